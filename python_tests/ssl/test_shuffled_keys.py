"""MoCo's shuffled batch norm: the keys' statistics are of other images than the query's, and nothing else changes."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from iecl_fast.ssl import MoCo, build_backbone, build_method
from iecl_fast.ssl.batch_norm import sync_batch_norm
from iecl_fast.ssl.encoders import normalize_rows
from ranks import run_on_group_sizes
from toys import Normed

SIDE, STEPS = 4, 3
SIZES = {2: [(8, 8), (5, 9)], 3: [(4, 4, 4), (6, 2, 4)]}  # images of each rank


class Watched(nn.Module):
    """A backbone that notes which images come together, and whose features are the pixels as they are."""

    feature_dim = 8

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=1.0)  # its running statistics are those of the last batch
        self.seen = []

    def forward(self, images):
        self.norm(images)
        self.seen.append(images[:, 0, 0, 0].detach())
        return images.flatten(1)[:, :8]


def numbered_images(n):
    """The first pixel of an image is its number, all others are of chance."""
    images = torch.randn(n, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    images[:, 0, 0, 0] = torch.arange(n)
    return images


def watched_moco():
    torch.manual_seed(0)
    method = MoCo(Watched(), dim=8, num_keys=20, head="linear")
    method.encoder.head = method.key_encoder.module.head = nn.Identity()
    return method


def small_resnet_moco():
    torch.manual_seed(0)
    return MoCo(build_backbone("resnet18", "small", 4), dim=8, num_keys=20, temperature=0.2)


def watch(rank, sizes):
    method = watched_moco()
    images = numbered_images(sum(sizes)).split(sizes)[rank]
    keys = []
    for _ in range(STEPS):
        method([images, images])
        keys.append(method._pending[-1])
        method.after_step()
    statistics = {
        f"{name}_mean": encoder.backbone.norm.running_mean
        for name, encoder in (("queries", method.encoder), ("keys", method.key_encoder.module))
    }
    with_resnet = small_resnet_moco()
    with torch.no_grad():
        with_resnet([images, images])
    return {
        "keys": torch.stack(keys),
        "seen": torch.stack(method.key_encoder.module.backbone.seen),
        "seen_queries": torch.stack(method.encoder.backbone.seen),
        "resnet_keys": with_resnet._pending[0],
        **statistics,
    }


def watch_all(rank):
    return [watch(rank, sizes) for sizes in SIZES[dist.get_world_size()]]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    return run_on_group_sizes(watch_all, tmp_path_factory.mktemp("ranks"), world_sizes=tuple(SIZES))


CASES = [(size, case) for size in SIZES for case in range(2)]


@pytest.mark.parametrize(("size", "case"), CASES)
def test_each_key_is_made_once_on_some_rank_in_an_order_of_its_own_each_step(of_ranks, size, case):
    sizes = SIZES[size][case]
    seen = torch.cat([result[case]["seen"] for result in of_ranks[size]], dim=1)
    assert torch.equal(seen.sort(dim=1).values, torch.arange(float(sum(sizes))).expand(STEPS, -1))
    assert len({tuple(order.tolist()) for order in seen}) == STEPS
    for rank, own in enumerate(torch.arange(float(sum(sizes))).split(sizes)):
        result = of_ranks[size][rank][case]
        assert torch.equal(result["seen_queries"], own.expand(STEPS, -1))  # queries stay where they are
        for together in result["seen"]:
            assert set(together.tolist()) != set(own.tolist())  # not the images that its queries are normalised with


@pytest.mark.parametrize(("size", "case"), CASES)
def test_the_shuffle_is_undone_exactly(of_ranks, size, case):
    sizes = SIZES[size][case]
    for rank, images in enumerate(numbered_images(sum(sizes)).split(sizes)):
        expected = normalize_rows(images.flatten(1)[:, :8])
        assert torch.equal(of_ranks[size][rank][case]["keys"], expected.expand(STEPS, -1, -1))


@pytest.mark.parametrize(("size", "case"), CASES)
def test_the_statistics_are_those_of_the_images_that_came_together(of_ranks, size, case):
    sizes = SIZES[size][case]
    images = numbered_images(sum(sizes))
    for rank, own in enumerate(images.split(sizes)):
        result = of_ranks[size][rank][case]
        came = images[result["seen"][-1].long()].mean(dim=(0, 2, 3))
        torch.testing.assert_close(result["keys_mean"], came)
        torch.testing.assert_close(result["queries_mean"], own.mean(dim=(0, 2, 3)))
        assert (result["keys_mean"] - result["queries_mean"]).abs().max() > 1e-3


@pytest.mark.parametrize(("size", "case"), CASES)
def test_keys_of_a_network_are_normalised_in_those_groups(of_ranks, size, case):
    sizes = SIZES[size][case]
    images = numbered_images(sum(sizes))
    expected, unshuffled = torch.empty(sum(sizes), 8), []
    for rank, own in enumerate(images.split(sizes)):
        together = of_ranks[size][rank][case]["seen"][0].long()
        expected[together] = copy.deepcopy(small_resnet_moco().key_encoder)(images[together])
        unshuffled.append(small_resnet_moco().key_encoder(own))
    keys = torch.cat([result[case]["resnet_keys"] for result in of_ranks[size]])
    torch.testing.assert_close(keys, expected, atol=1e-5, rtol=1e-4)
    assert (torch.cat(unshuffled) - expected).abs().max() > 0.01


def test_alone_nothing_is_shuffled():
    method = watched_moco()
    images = numbered_images(6)
    method([images, images])
    assert torch.equal(method.key_encoder.module.backbone.seen[0], torch.arange(6.0))


@pytest.mark.parametrize("name", ["moco", "iecl", "byol", "simclr"])
def test_statistics_over_all_ranks_are_for_all_but_shuffled_keys(name):
    torch.manual_seed(0)
    method = build_method(name, Normed(), dim=8, **({"num_keys": 8} if name in ("moco", "iecl") else {}))
    parameters, names = list(method.parameters()), list(method.state_dict())
    sync_batch_norm(method)
    assert all(old is new for old, new in zip(parameters, method.parameters(), strict=True))
    assert list(method.state_dict()) == names
    for path, module in method.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            shuffled = path.startswith("key_encoder.")
            assert isinstance(module, nn.SyncBatchNorm) != shuffled, path
    # Without a process group it is the batch norm it was.
    views = [torch.randn(4, 3, SIDE, SIDE) for _ in range(2)]
    plain = copy.deepcopy(method)
    for module in plain.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.forward = nn.BatchNorm2d.forward.__get__(module)
    assert {k: v.item() for k, v in method(views).items()} == {k: v.item() for k, v in plain(views).items()}
