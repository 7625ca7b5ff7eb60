"""DistributedDataParallel on two gloo processes, with and without broadcast buffers."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from iecl_fast import spectral_norm
from ranks import run_on_ranks

ROWS = 8


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(4 * 4, 3))
    spectral_norm(model)
    return model


def batch(step):
    return torch.randn(ROWS, 3, 6, 6, generator=torch.Generator().manual_seed(step))


def train(model, forward, rows):
    """Three steps of two forward passes before each backward; the gradients of the last step, and the state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        x = batch(step)[rows]
        (forward(x).square().mean() + forward(-x).square().mean()).backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return {"gradients": gradients, "state": {name: value.clone() for name, value in model.state_dict().items()}}


def train_rank(rank, broadcast_buffers):
    model = network()
    parallel = DistributedDataParallel(model, broadcast_buffers=broadcast_buffers)
    return train(model, parallel, slice(rank * ROWS // 2, (rank + 1) * ROWS // 2))


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")
@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_two_ranks_equal_one_process_on_the_joined_batch(tmp_path, broadcast_buffers):
    results = run_on_ranks(train_rank, tmp_path, broadcast_buffers)
    model = network()
    expected = train(model, model, slice(0, ROWS))
    for result in results:
        for got, wanted in zip(result["gradients"], expected["gradients"]):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
        for name, wanted in expected["state"].items():
            torch.testing.assert_close(result["state"][name], wanted, rtol=1e-4, atol=1e-6)
            assert torch.equal(results[0]["state"][name], results[1]["state"][name]), name
