"""Networks to normalise, by iecl_fast and by torch, and what to compare of them."""

import copy

import torch
from torch import nn
from torch.nn.utils import parametrizations

from iecl_fast import spectral_norm


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


def twins(make=network):
    """The same network normalised by iecl_fast and by torch, from the same random numbers."""
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours)
    torch.manual_seed(1)
    handle = spectral_norm(ours)
    torch.manual_seed(1)
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


def exact_sigma(weight):
    matrix = weight.detach().double().flatten(1)
    return torch.linalg.eigvalsh(matrix @ matrix.T)[-1].sqrt()
