"""pytest-benchmark comparisons: ``pytest bench/spectral --benchmark-group-by=group``, a group for each network."""

import pytest

from bench.spectral import peers

FORMS = {"iecl_fast": peers.ours, "torch's loop": peers.torch_loop, "foreach": peers.foreach}


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("form", FORMS)
def test_forward(benchmark, name, form):
    benchmark.group = f"{name}, forward"
    weights = benchmark.pedantic(FORMS[form](peers.network(name)), rounds=7, warmup_rounds=2)
    assert all(weight.isfinite().all() for weight in weights)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("form", ["iecl_fast", "torch's loop"])
def test_forward_and_backward(benchmark, name, form):
    benchmark.group = f"{name}, forward and backward"
    model = peers.network(name)
    benchmark.pedantic(peers.with_gradient(FORMS[form](model)), rounds=5, warmup_rounds=2)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_copy(benchmark, name):
    """Twice the weights' bytes: what a form that reads and writes each weight once would take at the least."""
    benchmark.group = f"{name}, forward"
    benchmark.pedantic(peers.copy_of(peers.weight_bytes(peers.network(name))), rounds=7, warmup_rounds=2)
