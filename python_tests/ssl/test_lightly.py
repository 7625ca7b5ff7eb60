"""SAIB and ring_info_nce in somebody else's MoCo and SimCLR: heads, momentum and losses of lightly, on digits."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from iecl_fast import SAIB, MemoryQueue, ring_info_nce
from iecl_fast.entropy import gaussian_entropy
from torch_threads import torch_threads

pytest.importorskip("lightly", reason="lightly is not installed: pip install '.[lightly]'")
from lightly.loss import NTXentLoss
from lightly.models.modules import MoCoProjectionHead, SimCLRProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum

BATCH, KEYS, DIM, TEMPERATURE = 64, 256, 32, 0.1
STEPS = 30


@pytest.fixture(autouse=True)
def one_thread():
    """Networks this small gain nothing from more, and wait for each other on a busy machine."""
    with torch_threads(1):
        yield


class Model(nn.Module):
    """A backbone and a projection head, in the shape of lightly's example models."""

    def __init__(self, head, **options):
        super().__init__()
        convolutions = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1)]
        self.backbone = nn.Sequential(*convolutions, nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.projection_head = head(128, 128, DIM, **options)

    def forward(self, images):
        return self.projection_head(self.backbone(images).flatten(start_dim=1))


def batches():
    """Two views of 64 digits for each step: as they are and moved by a pixel, both with noise."""
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) / 16 - 0.3
    for _ in range(STEPS):
        chosen = images[torch.randperm(len(images))[:BATCH]]
        yield [view + 0.1 * torch.randn(chosen.shape) for view in (chosen, chosen.roll(1, dims=3))]


def entropy(rows):
    return gaussian_entropy(F.normalize(rows, dim=1) * math.sqrt(DIM), noise_floor=0.01) / DIM


def simclr_loss(first, second, lower=0.0, upper=100.0):
    """ring_info_nce in place of NTXentLoss without a memory bank; percentiles are of the batch without the positive.

    The query itself is the most similar of all, so the last rank is left to it.
    """
    n = len(first)
    own, others = F.normalize(torch.cat([first, second]), dim=1), F.normalize(torch.cat([second, first]), dim=1)
    upper = min(upper, 100 * (2 * n - 2.5) / (2 * n - 1))
    positives = torch.arange(2 * n).roll(n)
    return ring_info_nce(own, others, own, lower=lower, upper=upper, temperature=TEMPERATURE, exclude=positives)


def value_and_gradients(loss, *rows):
    rows = [row.clone().requires_grad_() for row in rows]
    value = loss(*rows)
    return value.detach(), torch.autograd.grad(value, rows)


def assert_learns(losses):
    """The loss falls, from when a queue holds the encoder's keys to the end."""
    start = KEYS // BATCH
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-10:]) < 0.8 * sum(losses[start : start + 10]), losses


def assert_every_weight_moved(saib, before):
    for (name, old), new in zip(before.named_parameters(), saib.parameters(), strict=True):
        assert new.isfinite().all() and not torch.equal(old, new), name


def test_is_their_loss_with_a_memory_bank():
    theirs = NTXentLoss(temperature=TEMPERATURE, memory_bank_size=(KEYS, DIM))
    bank = theirs.memory_bank.bank.clone()
    query, key = torch.randn(2, BATCH, DIM)
    expected = value_and_gradients(lambda query: theirs(query, key), query)

    def ours(negatives):
        return lambda query: ring_info_nce(
            F.normalize(query, dim=1), F.normalize(key, dim=1), negatives, temperature=TEMPERATURE
        )

    for negatives in (bank, bank.T):
        torch.testing.assert_close(value_and_gradients(ours(negatives), query), expected)


def test_is_their_loss_without_a_memory_bank():
    views = torch.randn(2, BATCH, DIM)
    expected = value_and_gradients(NTXentLoss(temperature=TEMPERATURE), *views)
    torch.testing.assert_close(value_and_gradients(simclr_loss, *views), expected)


def test_trains_in_their_moco():
    model = Model(MoCoProjectionHead, batch_norm=True)
    key_model = copy.deepcopy(model)
    deactivate_requires_grad(key_model)
    saib = SAIB(channels="batch", batch_size=BATCH, patch_size=4, image_size=8)
    before = copy.deepcopy(saib)
    queue = MemoryQueue(KEYS, DIM)
    optimizer = torch.optim.SGD([*model.parameters(), *saib.parameters()], lr=0.06, momentum=0.9)
    losses = []
    for query_images, key_images in batches():
        update_momentum(model, key_model, m=0.99)
        query = F.normalize(model(query_images), dim=1)
        transformed = saib(key_images)
        key = F.normalize(key_model(transformed.detach()), dim=1)
        loss = ring_info_nce(query, key, queue.keys, lower=10, upper=95, temperature=TEMPERATURE)
        losses.append(loss.item())
        (loss - 0.02 * entropy(model(transformed))).backward()  # of this alone the block learns
        optimizer.step()
        optimizer.zero_grad()
        queue.enqueue(key)
    assert queue.filled == KEYS
    assert_learns(losses)
    assert_every_weight_moved(saib, before)


def test_trains_in_their_simclr():
    model = Model(SimCLRProjectionHead)
    saib = SAIB(channels="patch", patch_size=4, image_size=8)
    before = copy.deepcopy(saib)
    optimizer = torch.optim.SGD([*model.parameters(), *saib.parameters()], lr=0.06, momentum=0.9)
    losses = []
    for images in batches():
        first, second = model(images[0]), model(saib(images[1]))
        loss = simclr_loss(first, second, lower=10, upper=95)
        losses.append(loss.item())
        (loss - 0.02 * entropy(second)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_learns(losses)
    assert_every_weight_moved(saib, before)
