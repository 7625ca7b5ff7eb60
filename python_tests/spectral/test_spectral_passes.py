"""One power iteration per forward pass, whichever module is called."""

import copy
import gc

import pytest
import torch
from spectral.networks import assert_close, count_calls, images, network, twins, vectors
from torch import nn

import iecl_fast
from iecl_fast import spectral_norm
from iecl_fast.spectral import SpectralNormHandle


def test_one_call_per_pass_whichever_module_is_called(monkeypatch):
    model = network()
    calls = count_calls(monkeypatch)
    spectral_norm(model)
    assert calls == [3]
    model(images())
    assert calls == [3, 3]
    model[2](torch.randn(1, 8, 6, 6))
    assert calls == [3, 3, 2]
    model[0](images())
    assert calls == [3, 3, 2, 1]
    _ = model[0].weight
    assert calls == [3, 3, 2, 1, 1]


def test_a_module_called_alone_iterates_its_own_layers_only():
    model = network()
    spectral_norm(model)
    before = vectors(model)
    model[2](torch.randn(1, 8, 6, 6))
    changed = {name for name, vector in vectors(model).items() if not torch.equal(vector, before[name])}
    assert changed == {name for name in before if name.startswith("2.")}


def test_a_layer_called_twice_in_one_pass_uses_one_iteration():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            self.weights = [self.conv.weight, self.conv.weight]
            return self.conv(self.conv(x))

    torch.manual_seed(0)
    model = Twice()
    spectral_norm(model, initial_iterations=1)
    own = model.conv.parametrizations.weight
    once = iecl_fast.spectral.reference.power_iteration(own.original, own[0]._u, own[0]._v, 1, 1e-12)
    model(images()).sum().backward()
    assert model.weights[0] is model.weights[1]
    torch.testing.assert_close((own[0]._u, own[0]._v), once)
    assert own.original.grad.isfinite().all()


def test_two_passes_before_one_backward():
    ours, theirs, _ = twins()
    losses = [sum(model(images(seed=i)).square().sum() for i in range(2)) for model in (ours, theirs)]
    torch.testing.assert_close(*losses)
    for model, loss in zip((ours, theirs), losses):
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
    gradients = [{name: p.grad for name, p in model.named_parameters()} for model in (ours, theirs)]
    assert_close(*gradients, 1e-4)


def test_evaluation_leaves_vectors_alone_and_no_grad_in_training_does_not():
    model = network()
    spectral_norm(model)
    model.eval()
    before = vectors(model)
    first, second = model(images()), model(images())
    assert torch.equal(first, second) and all(torch.equal(before[k], v) for k, v in vectors(model).items())
    model.train()
    with torch.no_grad():
        model(images())
    assert not any(torch.equal(before[k], v) for k, v in vectors(model).items())


def test_frozen_stage_in_evaluation_mode():
    model = network()
    spectral_norm(model)
    model[2].eval()
    before = vectors(model)
    model(images())
    for name, vector in vectors(model).items():
        assert torch.equal(vector, before[name]) == name.startswith("2.")


def test_no_iterations_reuses_the_vectors():
    model = network()
    handle = spectral_norm(model, n_power_iterations=0)
    before, sigma = vectors(model), handle.sigma()
    model(images())
    assert all(torch.equal(before[k], v) for k, v in vectors(model).items())
    torch.testing.assert_close(model[0].weight * sigma["0"], model[0].parametrizations.weight.original)


def test_sigma_is_what_the_pass_divided_by():
    model = network()
    handle = spectral_norm(model)
    seen = {}
    model[2][0].register_forward_hook(lambda layer, *_: seen.update(weight=layer.weight))
    model(images())
    assert list(handle.sigma()) == ["0", "2.0", "2.2"]
    torch.testing.assert_close(seen["weight"] * handle.sigma()["2.0"], model[2][0].parametrizations.weight.original)


def test_an_exception_or_interrupt_leaves_nothing_stale():
    model = network()
    spectral_norm(model)
    for kind in (RuntimeError, KeyboardInterrupt):

        def fail(*_, kind=kind):
            raise kind("in the middle")

        hook = model[3].register_forward_hook(fail)
        with pytest.raises(kind, match="in the middle"):
            model(images())
        hook.remove()
        with torch.no_grad():
            model[0].parametrizations.weight.original.mul_(-1)
        expected = copy.deepcopy(model.state_dict())
        model(images()).sum().backward()
        other = network()
        spectral_norm(other)
        other.load_state_dict(expected)
        other(images())
        assert_close(model.state_dict(), other.state_dict(), 0)


def test_a_part_that_wants_a_gradient_within_a_pass_that_does_not():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            with torch.enable_grad():
                return self.conv(x).sum()

    model = Inner()
    spectral_norm(model)
    with torch.no_grad():
        loss = model(images())
    loss.backward()
    assert model.conv.parametrizations.weight.original.grad is not None


def test_nothing_is_kept_after_a_pass():
    model = network()
    spectral_norm(model)
    model(images())
    gc.collect()
    for layer in SpectralNormHandle(model).layers.values():
        current = layer.parametrizations.weight[0].current
        assert current.weight is None and current.scope is None
