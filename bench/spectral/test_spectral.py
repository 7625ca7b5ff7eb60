"""pytest-benchmark comparisons: ``pytest bench/spectral --benchmark-group-by=group``, a group for each network.

On the GPU where there is one.
"""

import pytest
import torch

from bench.device import captured, synchronised
from bench.spectral import peers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = {"iecl_fast": peers.ours, "torch's loop": peers.torch_loop, "foreach": peers.foreach}
NETWORKS = ["resnet18", "resnet50"]


def bench(benchmark, group, function):
    benchmark.group = group
    if DEVICE == "cuda":
        function = synchronised(function)
    result = benchmark.pedantic(function, rounds=7, warmup_rounds=2)
    tensors = [result] if isinstance(result, torch.Tensor) else result
    assert tensors and all(tensor.isfinite().all() for tensor in tensors)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("form", FORMS)
def test_forward(benchmark, name, form):
    weights = FORMS[form](peers.network(name, DEVICE))
    bench(benchmark, f"{name}, forward", weights)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("form", ["iecl_fast", "torch's loop"])
def test_forward_as_a_graph(benchmark, name, form):
    bench(benchmark, f"{name}, forward", captured(FORMS[form](peers.network(name, DEVICE))))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("form", ["iecl_fast", "torch's loop"])
def test_forward_and_backward(benchmark, name, form):
    function = peers.with_gradient(FORMS[form](peers.network(name, DEVICE)))
    bench(benchmark, f"{name}, forward and backward", function)


@pytest.mark.parametrize("name", NETWORKS)
def test_copy(benchmark, name):
    """Reads and writes each weight once: what no form can do without."""
    bench(benchmark, f"{name}, forward", peers.copy_of(peers.weight_bytes(peers.network(name)), DEVICE))
