"""Two processes are one on the joined batch, where no BatchNorm looks at a part of it."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from iecl_fast.ring import RingSchedule
from iecl_fast.ssl import IECL, SimCLR
from iecl_fast.ssl.gather import gather_rows_with_gradient
from ranks import run_on_ranks
from toys import Block, Flat

RING = RingSchedule(lower=(10, 30), upper=90, steps=4)


def simclr():
    return SimCLR(Flat(), dim=8, temperature=0.3, ring=RING, saib=Block())


def iecl():
    return IECL(
        Flat(), dim=8, num_keys=20, head="mlp", hidden_dim=16, momentum=0.5, spectral=False, symmetric=True,
        kl_weight=0.5, ring=RING, saib=Block(),
    )  # fmt: skip


METHODS = {"simclr": simclr, "iecl": iecl}


def batches():
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(10, 3, 4, 4, generator=generator) for _ in range(2)] for _ in range(3)]


def train(name, part, wrap):
    torch.manual_seed(0)
    method = METHODS[name]()
    wrapped = wrap(method)
    optimizer = torch.optim.SGD(method.parameter_groups(0.1), lr=0.2)
    results = {}
    for views in batches():
        optimizer.zero_grad()
        losses = wrapped([view[part] for view in views], None)
        sum(losses.values()).backward()
        results["gradients"] = [p.grad.clone() for p in method.parameters() if p.requires_grad]
        optimizer.step()
        method.after_step()
    results["losses"] = {key: loss.detach() for key, loss in losses.items()}
    results["state"] = method.state_dict()
    return results


def run_both(rank):
    part = slice(4 * rank, 4 + 6 * rank) if rank == 0 else slice(4, 10)
    rows = (torch.arange(10.0)[part, None] * torch.ones(3)).requires_grad_()
    joined, start = gather_rows_with_gradient(rows)
    ((rank + 1) * joined * torch.arange(10.0)[:, None]).sum().backward()
    gathered = {"joined": joined.detach(), "start": torch.tensor(start), "gradient": rows.grad}
    half = slice(5 * rank, 5 * rank + 5)
    return {"gathered": gathered, **{name: train(name, half, DistributedDataParallel) for name in METHODS}}


def test_two_ranks(tmp_path):
    results = run_on_ranks(run_both, tmp_path)
    for rank, (start, stop) in enumerate([(0, 4), (4, 10)]):
        gathered = results[rank]["gathered"]
        assert gathered["start"] == start
        assert torch.equal(gathered["joined"], torch.arange(10.0)[:, None] * torch.ones(3))
        # The ranks' losses weigh the rows 1 and 2 times.
        assert torch.equal(gathered["gradient"], 3 * torch.arange(10.0)[start:stop, None] * torch.ones(3))
    for name in METHODS:
        alone = train(name, slice(None), lambda method: method)
        for result in results:
            torch.testing.assert_close(result[name]["gradients"], alone["gradients"], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(result[name]["state"], alone["state"], atol=1e-5, rtol=1e-4)
        means = {key: sum(result[name]["losses"][key] for result in results) / 2 for key in alone["losses"]}
        torch.testing.assert_close(means, alone["losses"])


@pytest.mark.parametrize("n", [0, 3])
def test_alone_rows_pass_unchanged(n):
    rows = torch.zeros(n, 2, requires_grad=True)
    joined, start = gather_rows_with_gradient(rows)
    assert joined is rows and start == 0
