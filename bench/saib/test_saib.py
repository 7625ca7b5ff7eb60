"""pytest-benchmark comparisons: ``pytest bench/saib --benchmark-group-by=group``, a group for each shape.

On the GPU where there is one.
"""

import pytest
import torch

from bench.device import synchronised
from bench.saib import peers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("case", peers.GPU_CASES if DEVICE == "cuda" else peers.CPU_CASES, ids=str)
@pytest.mark.parametrize("name", peers.FORMS)
def test_forward_and_backward(benchmark, case, name):
    benchmark.group = str(case)
    function = peers.with_gradient(peers.FORMS[name], case, DEVICE)
    if DEVICE == "cuda":
        function = synchronised(function)
    assert benchmark.pedantic(function, rounds=5, warmup_rounds=1).isfinite().all()
