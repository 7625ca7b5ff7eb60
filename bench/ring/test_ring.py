"""pytest-benchmark comparisons: ``pytest bench/ring --benchmark-group-by=group``, a group for each shape and ring."""

import pytest

from bench.ring import peers
from bench.ring.peers import Case

CASES = [
    Case(n=256, k=4096),
    Case(n=64, k=65536),
    Case(n=256, k=65536),
    Case(n=256, k=65536, lower=0, upper=100),
]
LOSSES = {"ring_info_nce": peers.ring, "plain MoCo": peers.plain_moco, **peers.SELECTING}


def bench(benchmark, case, function):
    benchmark.group = str(case)
    result = benchmark.pedantic(function, rounds=5, warmup_rounds=1)
    assert result.isfinite().all()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient(benchmark, case, name):
    if (case.lower, case.upper) == (0, 100) and name in peers.SELECTING:
        pytest.skip("nothing to select")
    bench(benchmark, case, peers.with_gradient(LOSSES[name], case))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", ["matmul", "sample"])
def test_forward(benchmark, case, name):
    bench(benchmark, case, getattr(peers, name)(case))
