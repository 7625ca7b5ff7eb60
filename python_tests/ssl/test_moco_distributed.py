import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from iecl_fast.ssl import MoCo, build_backbone
from iecl_fast.ssl.encoders import normalize_rows
from ranks import run_on_ranks


class Pixels(nn.Module):
    """A backbone without BatchNorm, for images (3, 8, 8)."""

    feature_dim = 16

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(192, 16)

    def forward(self, images):
        return self.linear(images.flatten(1))


def build(backbone):
    torch.manual_seed(0)
    return MoCo(backbone(), dim=8, num_keys=20, temperature=0.2, momentum=0.5)


def small_resnet():
    return build_backbone("resnet18", "small", 4)


def joined_batches(sizes):
    """Two views for each of two steps; a rank's part follows the other's."""
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(sum(sizes), 3, 8, 8, generator=generator) for _ in range(2)] for _ in range(2)]


def train(method, wrapped, batches):
    optimizer = torch.optim.SGD(method.encoder.parameters(), lr=0.5)
    for views in batches:
        optimizer.zero_grad()
        sum(wrapped(views, None).values()).backward()
        gradients = [p.grad.clone() for p in method.encoder.parameters()]
        optimizer.step()
        method.after_step()
    return gradients


def run_both(rank):
    method = build(Pixels)
    wrapped = DistributedDataParallel(method)
    part = slice(5 * rank, 5 * rank + 5)
    gradients = train(method, wrapped, [[view[part] for view in views] for views in joined_batches((5, 5))])

    shuffled = {}
    for sizes in ((4, 4), (3, 5)):
        with_norm = build(small_resnet)
        views = joined_batches(sizes)[0]
        start = sum(sizes[:rank])
        with torch.no_grad():
            with_norm([view[start : start + sizes[rank]] for view in views])
        with_norm.after_step()
        shuffled[sizes] = with_norm.queue.keys
    return {"gradients": gradients, "queue": method.queue.keys, "shuffled": shuffled}


def test_two_ranks(tmp_path):
    results = run_on_ranks(run_both, tmp_path)

    # Without BatchNorm two ranks are one process on the joined batch: gradients, weights and queue.
    method = build(Pixels)
    gradients = train(method, method, joined_batches((5, 5)))
    for result in results:
        torch.testing.assert_close(result["gradients"], gradients)
        torch.testing.assert_close(result["queue"], method.queue.keys)

    # With it the key batch is a permutation over the ranks, each part normalised on its own, and put back in order.
    for sizes in ((4, 4), (3, 5)):
        keys = joined_batches(sizes)[0][1]
        order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
        expected = torch.empty(8, 8)
        unshuffled = []
        for part, own in zip(order.split(sizes), keys.split(sizes), strict=True):
            expected[part] = copy.deepcopy(build(small_resnet)).key_encoder(keys[part])
            unshuffled.append(build(small_resnet).key_encoder(own))
        for result in results:
            torch.testing.assert_close(result["shuffled"][sizes][:8], expected, atol=1e-5, rtol=1e-4)
        assert (torch.cat(unshuffled) - expected).abs().max() > 0.01
        torch.testing.assert_close(normalize_rows(expected), expected)
