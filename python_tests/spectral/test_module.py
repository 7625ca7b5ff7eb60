"""spectral_norm on networks: torch's numbers and keys, one iteration per pass, and what has tripped people."""

import copy
import gc
import io

import pytest
import torch
import torchvision
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import iecl_fast
from iecl_fast import remove_spectral_norm, spectral_norm
from iecl_fast.spectral import SpectralNormHandle
from iecl_fast.ssl.momentum import MomentumEncoder


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 1)),
        nn.Flatten(),
        nn.Linear(6 * 16, 5),
    )


def images(n=4, seed=0):
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def torch_loop(model, **options):
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            parametrizations.spectral_norm(layer, **options)
    return model


def twins(seed=0, make=network):
    """The same network normalised by iecl_fast and by torch, from the same random numbers."""
    torch.manual_seed(seed)
    ours = make()
    theirs = copy.deepcopy(ours)
    torch.manual_seed(seed + 1)
    handle = spectral_norm(ours)
    torch.manual_seed(seed + 1)
    torch_loop(theirs)
    return ours, theirs, handle


def vectors(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "parametrizations" in name}


def count_calls(monkeypatch):
    """How many layers each call of the operator gets."""
    calls, operator = [], torch.ops.iecl_fast.spectral_norm

    class Kernels:
        def spectral_norm(self, weights, *arguments):
            calls.append(len(weights))
            return operator(weights, *arguments)

    monkeypatch.setattr("iecl_fast.spectral.module._kernels", Kernels())
    return calls


def assert_close(ours, theirs, tolerance):
    for (name, one), (other_name, other) in zip(ours.items(), theirs.items(), strict=True):
        assert name == other_name
        torch.testing.assert_close(
            one, other, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


# ---- torch's numbers -----------------------------------------------------------------------------------------------


def test_same_random_numbers_give_torchs_vectors_weights_and_gradients():
    ours, theirs, handle = twins()
    assert_close(ours.state_dict(), theirs.state_dict(), 1e-6)
    for _ in range(3):
        outputs = [model(images()) for model in (ours, theirs)]
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
        for output in outputs:
            output.square().sum().backward()
    assert_close(vectors(ours), vectors(theirs), 1e-6)
    gradients = [{name: p.grad for name, p in model.named_parameters()} for model in (ours, theirs)]
    assert_close(*gradients, 1e-4)
    for name, sigma in handle.sigma().items():
        own = theirs.get_submodule(name).parametrizations.weight
        torch.testing.assert_close(sigma, own[0]._u @ own.original.flatten(1) @ own[0]._v)


@pytest.fixture
def one_thread():
    """Small operators by the thousand: on a busy machine their threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_fifty_training_steps_of_a_resnet18_agree_layer_by_layer(one_thread):
    ours, theirs, handle = twins(make=lambda: torchvision.models.resnet18(num_classes=10))
    for model in (ours, theirs):
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()  # the statistics of two images would multiply rounding errors from step to step
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9) for model in (ours, theirs)]
    start = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for step in range(50):
        x = torch.randn(2, 3, 16, 16, generator=generator)
        target = torch.randint(10, (2,), generator=generator)
        for model, optimizer in zip((ours, theirs), optimizers):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), target).backward()
            optimizer.step()
        if step % 10 == 9:
            assert_close(ours.state_dict(), theirs.state_dict(), 5e-4)
            for name, sigma in handle.sigma().items():
                own = theirs.get_submodule(name).parametrizations.weight
                torch.testing.assert_close(sigma, own[0]._u @ own.original.flatten(1) @ own[0]._v, rtol=1e-4, atol=0)
    moved = max((p - start[name]).abs().max() for name, p in theirs.named_parameters())
    assert moved > 0.05, "nothing was learned, so nothing was tested"


@pytest.mark.parametrize("direction", ["to torch", "from torch"])
def test_checkpoints_load_both_ways(direction):
    ours, theirs, _ = twins()
    for model in (ours, theirs):
        model(images())
    source, target = (ours, theirs) if direction == "to torch" else (theirs, ours)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for tensor in target.state_dict().values():
            tensor.normal_()
    target.load_state_dict(torch.load(file))
    assert_close(target.state_dict(), source.state_dict(), 0)
    source.eval(), target.eval()
    torch.testing.assert_close(target(images()), source(images()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(7, 5), (2, 7)),
        (lambda: nn.Conv1d(3, 5, 3), (2, 3, 8)),
        (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4)),
        (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 8, 8)),
        (lambda: nn.ConvTranspose1d(3, 5, 3), (2, 3, 8)),
        (lambda: nn.ConvTranspose2d(3, 5, 3, stride=2), (2, 3, 4, 4)),
        (lambda: nn.ConvTranspose3d(2, 3, 2), (2, 2, 3, 3, 3)),
    ],
)
def test_other_layers(make, shape):
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours)
    torch.manual_seed(1)
    spectral_norm(ours, layers=(type(ours),))
    torch.manual_seed(1)
    parametrizations.spectral_norm(theirs)
    x = torch.randn(shape)
    outputs = [layer(x) for layer in (ours, theirs)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
    for output in outputs:
        output.square().sum().backward()
    assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()), 1e-6)
    for one, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_more_iterations_and_eps():
    torch.manual_seed(0)
    ours = network()
    theirs = copy.deepcopy(ours)
    torch.manual_seed(1)
    spectral_norm(ours, n_power_iterations=3, eps=0.5, initial_iterations=18)
    torch.manual_seed(1)
    torch_loop(theirs, n_power_iterations=3, eps=0.5)
    ours(images()), theirs(images())
    assert_close(ours.state_dict(), theirs.state_dict(), 1e-5)


# ---- passes and iterations -----------------------------------------------------------------------------------------


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


# ---- what has tripped people ---------------------------------------------------------------------------------------


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


# ---- removal and arguments -----------------------------------------------------------------------------------------


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


def exact_sigma(weight):
    matrix = weight.detach().double().flatten(1)
    return torch.linalg.eigvalsh(matrix @ matrix.T)[-1].sqrt()


@pytest.mark.parametrize(("iterations", "allowed"), [(16, 0.06), (200, 0.01)])
def test_initial_iterations_bring_estimates_close(one_thread, iterations, allowed, record_property):
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    handle = spectral_norm(model, initial_iterations=iterations)
    sigmas = handle.sigma()
    errors = {
        name: (1 - sigmas[name] / exact_sigma(layer.parametrizations.weight.original)).item()
        for name, layer in handle.layers.items()
    }
    record_property("relative errors", errors)
    assert all(-1e-6 < error < allowed for error in errors.values()), errors


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
