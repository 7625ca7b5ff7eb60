"""spectral_norm under what has tripped people: copies, casts, autocast, ties, compilation, removal, bad arguments."""

import copy

import pytest
import torch
from spectral.networks import assert_close, count_calls, exact_sigma, images, network, torch_loop, twins, vectors
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from iecl_fast import remove_spectral_norm, spectral_norm
from iecl_fast.spectral import SpectralNormHandle
from iecl_fast.ssl.momentum import MomentumEncoder


@pytest.mark.parametrize("passes", [0, 1])
def test_deepcopy(passes):
    model = network()
    spectral_norm(model)
    for _ in range(passes):
        model(images()).sum().backward()
    other = copy.deepcopy(model)
    assert torch.equal(other(images()), model(images()))
    before = vectors(model)
    other(images())
    assert all(torch.equal(before[k], v) for k, v in vectors(model).items())
    assert SpectralNormHandle(other).layers["0"] is other[0]
    part = copy.deepcopy(model[2])
    assert torch.equal(part(torch.ones(1, 8, 6, 6)), model[2](torch.ones(1, 8, 6, 6)))
    remove_spectral_norm(other)
    assert len(SpectralNormHandle(model).layers) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_iterates_in_float32(dtype):
    torch.manual_seed(0)
    model = network()
    spectral_norm(model)
    other = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=dtype):
        output = model(images())
    assert output.dtype == dtype
    output.float().sum().backward()
    other(images())
    assert_close(vectors(model), vectors(other), 0)
    assert model[0].parametrizations.weight.original.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_cast_after_registration(dtype):
    model = network()
    handle = spectral_norm(model, initial_iterations=100)
    model.to(dtype)
    output = model(images().to(dtype))
    output.sum().backward()
    assert output.dtype == dtype and {v.dtype for v in vectors(model).values()} == {dtype}
    for name, layer in handle.layers.items():
        exact = exact_sigma(layer.parametrizations.weight.original)
        torch.testing.assert_close(handle.sigma()[name].double(), exact, rtol=0.03, atol=0)


def test_channels_last():
    ours, theirs, _ = twins()
    ours.to(memory_format=torch.channels_last)
    outputs = ours(images().to(memory_format=torch.channels_last)), theirs(images())
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
    assert ours[2][0].weight.is_contiguous(memory_format=torch.channels_last)
    for output in outputs:
        output.square().sum().backward()
    gradients = [{name: p.grad for name, p in model.named_parameters()} for model in (ours, theirs)]
    assert_close(*gradients, 1e-4)


def test_moved_to_another_device():
    model = network()
    handle = spectral_norm(model)
    model.to("meta")
    assert model(torch.empty(2, 3, 8, 8, device="meta")).shape == (2, 5)
    assert handle.sigma()["0"].device.type == "meta"


def test_zero_weight_gives_zero_and_can_learn():
    model = network()
    nn.init.zeros_(model[0].weight)
    spectral_norm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output = model(images())
    assert output.isfinite().all() and (model[0].weight == 0).all()
    output.square().sum().backward()
    optimizer.step()
    model.zero_grad()
    model(images()).square().sum().backward()
    assert all(p.isfinite().all() and p.grad.isfinite().all() for p in model.parameters())
    sigma = torch.linalg.matrix_norm(model[2][2].weight.flatten(1), ord=2)
    torch.testing.assert_close(sigma, torch.ones(()), rtol=0.05, atol=0)


def test_tied_weights():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    model[1].weight = model[0].weight
    theirs = copy.deepcopy(model)
    torch.manual_seed(0)
    spectral_norm(model)
    torch.manual_seed(0)
    torch_loop(theirs)
    assert model[0].parametrizations.weight.original is model[1].parametrizations.weight.original
    for one in (model, theirs):
        one(images()).square().sum().backward()
    assert len(list(model.parameters())) == 3
    for one, other in zip(model.parameters(), theirs.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_a_module_used_twice_in_the_tree():
    block = nn.Sequential(nn.Conv2d(3, 3, 1))
    model = nn.Sequential(block, nn.Sequential(block))
    spectral_norm(model)
    model(images()).sum().backward()
    assert list(SpectralNormHandle(model).layers) == ["0.0"]


def test_layers_of_two_kinds_in_two_calls(monkeypatch):
    model = network()
    spectral_norm(model)
    spectral_norm(model, layers=(nn.Linear,))
    calls = count_calls(monkeypatch)
    model(images())
    assert sorted(calls) == [1, 3]
    assert len(SpectralNormHandle(model).layers) == 4


def test_compile():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.Tanh(), nn.Conv2d(4, 2, 1)))
    spectral_norm(model)
    other = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True)
    for step in range(3):
        output, expected = compiled(images(seed=step)), other(images(seed=step))
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        output.square().sum().backward()
        expected.square().sum().backward()
        for one, same in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(one.grad, same.grad, rtol=1e-3, atol=1e-4)
            with torch.no_grad():
                one.sub_(0.01 * one.grad)
                same.sub_(0.01 * same.grad)
    assert_close(vectors(model), vectors(other), 1e-4)
    model.eval(), other.eval()
    torch.testing.assert_close(compiled(images()), other(images()), rtol=1e-4, atol=1e-5)


def test_momentum_encoder_averages_raw_weights_and_copies_vectors():
    torch.manual_seed(0)
    online = network()
    spectral_norm(online)
    momentum = MomentumEncoder(online, 0.9)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.01)
    for _ in range(5):
        online(images()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        momentum(images())  # iterates its own u and v, like any pass in training
        old = copy.deepcopy(momentum.module.state_dict())
        momentum.update(online)
        new, theirs = momentum.module.state_dict(), online.state_dict()
        for name in new:
            if name.endswith(("._u", "._v")):
                assert torch.equal(new[name], theirs[name])
                torch.testing.assert_close(new[name].norm(), torch.ones(()))
            else:
                torch.testing.assert_close(new[name], 0.9 * old[name] + 0.1 * theirs[name])
    plain = network()
    with pytest.raises(ValueError, match="exists only in"):
        momentum.update(plain)


def test_activation_checkpointing():
    for reentrant in (False, True):
        model = network()
        spectral_norm(model, n_power_iterations=0)  # the pass is run again in the backward pass, on the same u and v
        x = images().requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
        got = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).square().sum().backward()
        torch.testing.assert_close(got, [p.grad for p in model.parameters()])


def test_remove_gives_a_plain_network_with_the_normalised_weights():
    model = network()
    plain_keys = list(model.state_dict())
    spectral_norm(model)
    parameters = set(model.parameters())
    model(images())
    model.eval()
    expected = model(images())
    model.train()
    remove_spectral_norm(model)
    assert sorted(model.state_dict()) == sorted(plain_keys) and set(model.parameters()) == parameters
    torch.testing.assert_close(model(images()), expected, rtol=0, atol=0)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert not any(parametrize.is_parametrized(module) for module in model.modules())
    with pytest.raises(ValueError, match="Sequential has no layer under"):
        remove_spectral_norm(model)
    spectral_norm(model)
    model(images())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n_power_iterations": -1}, ValueError, "n_power_iterations = -1 is not allowed: at least 0"),
        ({"initial_iterations": -1}, ValueError, "initial_iterations = -1 is not allowed"),
        ({"eps": 0.0}, ValueError, "eps = 0.0 is not allowed: a positive number"),
        ({"layers": (nn.Conv3d,)}, ValueError, r"layers = \['Conv3d'\] match no module of Sequential"),
        ({"layers": (nn.BatchNorm2d,)}, TypeError, r"1\.weight is torch.float32 of shape \(4,\)"),
        ({"layers": (nn.LazyConv2d,)}, ValueError, "2 has no weight before its first forward pass"),
    ],
)
def test_arguments(options, error, message):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.LazyConv2d(4, 1))
    with pytest.raises(error, match=message):
        spectral_norm(model, **options)
    assert not any(parametrize.is_parametrized(module) for module in model.modules())


def test_layers_that_are_normalised_already():
    model = network()
    spectral_norm(model)
    with pytest.raises(ValueError, match="0 has a parametrized weight already"):
        spectral_norm(model)
    theirs = torch_loop(network())
    with pytest.raises(ValueError, match="0 has a parametrized weight already"):
        spectral_norm(theirs)
