"""Ways to normalise all convolutions of a network, one power iteration each: ours and everyone else's."""

import copy
from collections.abc import Callable

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from iecl_fast import spectral_norm

EPS = 1e-12


def network(name: str, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return getattr(torchvision.models, name)().to(device)


def convolutions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


def weight_bytes(model: nn.Module) -> int:
    return sum(layer.weight.nbytes for layer in convolutions(model))


def ours(model: nn.Module) -> Callable[[], list[Tensor]]:
    """What the outermost module's hooks do when a pass begins and ends."""
    model = copy.deepcopy(model)
    spectral_norm(model)
    layers = convolutions(model)
    (enter,), (leave,) = model._forward_pre_hooks.values(), model._forward_hooks.values()

    def run() -> list[Tensor]:
        enter(model, ())
        weights = [layer.weight for layer in layers]
        leave(model, (), None)
        return weights

    return _without_gradient(run)


def operator(model: nn.Module) -> Callable[[], list[Tensor]]:
    """Ours without what finds the layers and writes u and v back."""
    weights = [layer.weight.detach() for layer in convolutions(model)]
    vectors = torch.cat([torch.randn(n, device=w.device) for w in weights for n in (w.shape[0], w[0].numel())])
    return lambda: torch.ops.iecl_fast.spectral_norm(weights, vectors, 1, EPS, True)[0]


def torch_loop(model: nn.Module, compiled: bool = False) -> Callable[[], list[Tensor]]:
    """torch's parametrization on each layer."""
    model = copy.deepcopy(model)
    for layer in convolutions(model):
        parametrizations.spectral_norm(layer)
    layers = convolutions(model)
    weights = _without_gradient(lambda: [layer.weight for layer in layers])
    return torch.compile(weights) if compiled else weights


def foreach(model: nn.Module) -> Callable[[], list[Tensor]]:
    """A product per layer, everything else in torch._foreach calls."""
    weights = [layer.weight.detach() for layer in convolutions(model)]
    matrices = [weight.flatten(1) for weight in weights]
    v = [matrix.new_empty(matrix.shape[1]).normal_() for matrix in matrices]

    def normalise(vectors: list[Tensor]) -> list[Tensor]:
        lengths = torch._foreach_norm(vectors)
        torch._foreach_clamp_min_(lengths, EPS)
        return torch._foreach_div(vectors, lengths)

    def run() -> list[Tensor]:
        u = normalise([torch.mv(matrix, vector) for matrix, vector in zip(matrices, v)])
        torch._foreach_copy_(v, normalise([torch.mv(matrix.T, vector) for matrix, vector in zip(matrices, u)]))
        sigma = [torch.dot(a, torch.mv(matrix, b)) for matrix, a, b in zip(matrices, u, v)]
        return torch._foreach_div(weights, sigma)

    return _without_gradient(run)


def copy_of(count: int, device: str = "cpu") -> Callable[[], Tensor]:
    """A copy of so many bytes, into memory that is there already."""
    source = torch.ones(count // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def with_gradient(weights: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """Forward and backward, with a gradient for every weight."""

    def run() -> list[Tensor]:
        with torch.enable_grad():
            normalised = weights.with_graph()
        torch.autograd.backward(normalised, [weight.detach() for weight in normalised])
        return normalised

    return run


def _without_gradient(function: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    run = torch.no_grad()(function)
    run.with_graph = function
    return run
