"""spectral_norm has torch's numbers and keys, and its first estimates are close."""

import copy
import io

import pytest
import torch
import torchvision
from spectral.networks import assert_close, exact_sigma, images, network, torch_loop, twins, vectors
from torch import nn
from torch.nn.utils import parametrizations

from iecl_fast import spectral_norm


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
