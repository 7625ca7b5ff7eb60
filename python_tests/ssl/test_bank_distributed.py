"""Methods with a memory bank on two ranks are one process on the joined batch."""

import pytest
import torch
from small import Pixels
from torch.nn.parallel import DistributedDataParallel

from iecl_fast.ring import RingSchedule
from iecl_fast.ssl import CMC, InstanceDiscrimination, LabBackbone, LocalAggregation
from ranks import run_on_ranks

INDEX = torch.tensor([[3, 0, 8, 3, 1, 8], [7, 7, 2, 5, 7, 6], [1, 2, 3, 9, 0, 2]])  # of three steps; on both ranks, too
METHODS = ("ir", "ir_nce", "cmc", "la")


def build(name):
    torch.manual_seed(0)
    # Of 11 candidates the ring holds one: draws are no matter of chance, and the ranks draw the same.
    options = {"num_images": 12, "dim": 8, "num_samples": 5, "temperature": 0.2}
    ring = RingSchedule(lower=50, upper=55, steps=1)
    if name == "cmc":
        backbone = LabBackbone(Pixels(1), Pixels(2), mean=(0.5,) * 3, std=(0.2,) * 3)
        return CMC(backbone, ring=ring, **options)
    if name == "la":
        neighbours = {"num_neighbors": 5, "num_clusters": 3, "num_clusterings": 2, "warm_start": 0.0}
        return LocalAggregation(Pixels(), steps_per_epoch=2, **neighbours, **options)
    return InstanceDiscrimination(Pixels(), loss="nce" if name == "ir_nce" else "softmax", ring=ring, **options)


def train(name, wrap, part):
    method = build(name)
    wrapped = wrap(method)
    images = torch.randn(3, 6, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(method.parameters(), lr=0.5)
    for step in range(1 if name == "la" else 0, 3):  # la's first step is a warm start, whose draws are of chance
        if name == "la" and step == 1:
            method.after_step()
        optimizer.zero_grad()
        sum(wrapped([images[step, part]], INDEX[step, part]).values()).backward()
        gradients = [p.grad.clone() for p in method.parameters()]
        optimizer.step()
        method.after_step()
    return {"gradients": gradients, "state": {name: value.clone() for name, value in method.state_dict().items()}}


def train_on_rank(rank):
    part = slice(0, 3) if rank == 0 else slice(3, None)
    return {name: train(name, DistributedDataParallel, part) for name in METHODS}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    return run_on_ranks(train_on_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", METHODS)
def test_gradients_banks_and_clusters_are_those_of_one_process(of_ranks, name):
    alone = train(name, lambda method: method, slice(None))
    for result in of_ranks:
        torch.testing.assert_close(result[name]["gradients"], alone["gradients"], atol=1e-6, rtol=1e-4)
        for key, value in alone["state"].items():
            torch.testing.assert_close(result[name]["state"][key], value, atol=1e-5, rtol=1e-4, msg=key)
    first, second = (result[name]["state"] for result in of_ranks)
    assert all(torch.equal(first[key], second[key]) for key in first)
