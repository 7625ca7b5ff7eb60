"""Spectral normalisation of a network: a parametrization for each layer, one operator call for all of them."""

from collections.abc import Callable, Hashable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

import iecl_fast.spectral.ops  # noqa: F401  (registers the operators)

_kernels = torch.ops.iecl_fast
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def spectral_norm(
    model: nn.Module,
    *,
    n_power_iterations: int = 1,
    eps: float = 1e-12,
    layers: tuple[type[nn.Module], ...] = (nn.Conv2d,),
    initial_iterations: int = 16,
) -> "SpectralNormHandle":
    """Divide the weights of a network's layers by estimates of their largest singular values, all in one call.

    Miyato et al., "Spectral Normalization for Generative Adversarial Networks". Numbers, ``state_dict`` keys and
    meaning are those of ``torch.nn.utils.parametrizations.spectral_norm`` on each layer, so checkpoints load either
    way: a weight is a matrix (out channels, all the rest), u and v are updated in place in training and left alone in
    evaluation, no gradient goes through them. It bounds the norm of that matrix, not of the convolution as an
    operator, whose norm also depends on stride and padding and can be larger by up to the square root of the number
    of kernel positions.

    Where it differs from torch's:

    * One power iteration and one operator call per forward pass of the outermost module that is called, however often
      a layer's weight is used in it. Any module of the network can be called alone; a weight read outside of a
      forward pass is normalised, and in training iterated, by itself.
    * Under autocast, and for float16 and bfloat16 weights, the iteration runs in float32.
    * A weight that is all zero stays zero, and gets its gradient undivided, where torch's is NaN.
    * All weight gradients come out of one operator, at the end of the backward pass: DistributedDataParallel cannot
      send the first of them while the rest is computed.

    As in torch, training mode iterates under ``no_grad`` too: call ``eval()`` for a pass that is not to touch u and
    v. A momentum encoder averages the raw weights by name and copies u and v.

    Args:
        model: changed in place. Its modules of the types ``layers`` need a weight of two dimensions or more; transposed
            convolutions count their out channels as rows.
        n_power_iterations: per forward pass in training; 0 keeps u and v as they are.
        eps: the least length that a vector is divided by.
        layers: types of the modules to normalise.
        initial_iterations: power iterations at once, from random vectors; torch's takes 16 in training mode. The
            estimate is always from below: take 100 or more if the first passes have to be close.

    Returns:
        A handle with every layer's sigma.

    Raises:
        ValueError: if no layer matches, or one has a parametrized weight already; it is named.
        TypeError: if a layer's weight is not a floating-point tensor of two dimensions or more; it is named.
    """
    for name, value in (("n_power_iterations", n_power_iterations), ("initial_iterations", initial_iterations)):
        if value < 0:
            raise ValueError(f"{name} = {value} is not allowed: at least 0")
    if not eps > 0:
        raise ValueError(f"eps = {eps} is not allowed: a positive number")
    chosen = {name: module for name, module in model.named_modules() if isinstance(module, tuple(layers))}
    if not chosen:
        raise ValueError(f"layers = {[kind.__name__ for kind in layers]} match no module of {type(model).__name__}")
    for name, layer in chosen.items():
        _check(name or type(model).__name__, layer)
    for layer in chosen.values():
        axis = 1 if isinstance(layer, TRANSPOSED) else 0
        parametrization = _SpectralNorm(layer.weight, axis, n_power_iterations, eps).train(layer.training)
        # unsafe: the check would be one more power iteration.
        parametrize.register_parametrization(layer, "weight", parametrization, unsafe=True)
    new = {layer: (_own(layer), layer.parametrizations.weight) for layer in chosen.values()}
    owns, weights = zip(*((own, weight.original) for own, weight in new.values()))
    with torch.no_grad():
        for places, matrices, vectors in _batches(owns, weights, lambda own: None):
            _, vectors, _ = _kernels.spectral_norm(matrices, vectors, initial_iterations, eps, False)
            _store([owns[place] for place in places], vectors)
    for name, module in model.named_modules():
        inside = [new[layer] for layer in module.modules() if layer in new and layer is not module]
        if inside:
            _Scope(inside, depth=name.count(".") + (name != "")).attach(module)
    return SpectralNormHandle(model)


def remove_spectral_norm(model: nn.Module) -> None:
    """Make every normalised weight of a network a plain parameter again, with the value it has in evaluation.

    The parameters stay the same objects, so an optimiser goes on with them.

    Raises:
        ValueError: if no layer is normalised.
    """
    layers = SpectralNormHandle(model).layers
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layer under iecl_fast.spectral_norm")
    for layer in layers.values():
        _own(layer).eval()  # no further iteration
        parametrize.remove_parametrizations(layer, "weight")
    for module in model.modules():
        for hook in list(module._forward_pre_hooks.values()):
            scope = getattr(hook, "__self__", None)
            if isinstance(scope, _Scope):
                scope.detach()


class SpectralNormHandle:
    """Shows the normalised layers of a network; can also be made for a copy of it."""

    def __init__(self, model: nn.Module):
        self.model = model

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The normalised layers by their names in the network."""
        return {name: module for name, module in self.model.named_modules() if _own(module) is not None}

    @torch.no_grad()
    def sigma(self) -> dict[str, Tensor]:
        """By what each layer's weight is divided in evaluation, ``u . W v``, of the weights, u and v as they are now.

        After a forward pass in training and before the optimiser's step, that is what the pass has divided by.
        """
        layers = self.layers
        owns = [_own(layer) for layer in layers.values()]
        weights = [layer.parametrizations.weight.original for layer in layers.values()]
        sigmas = {}
        for places, matrices, vectors in _batches(owns, weights, lambda own: None):
            _, _, sigma = _kernels.spectral_norm(matrices, vectors, 0, 1.0, False)
            sigmas.update(zip(places, sigma.unbind()))
        return {name: sigmas[place] for place, name in enumerate(layers)}


class _Pass:
    """A layer's normalised weight while a forward pass runs, and the scope that has made it.

    Not attributes of the module itself: those are slow to set, and every pass sets them for every layer.
    """

    __slots__ = ("scope", "weight")

    def __init__(self):
        self.weight: Tensor | None = None
        self.scope: _Scope | None = None


class _SpectralNorm(nn.Module):
    """One layer's u and v under torch's names."""

    def __init__(self, weight: Tensor, axis: int, n_power_iterations: int, eps: float):
        super().__init__()
        self.axis, self.n_power_iterations, self.eps = axis, n_power_iterations, eps
        rows = weight.shape[axis]
        for name, size in (("_u", rows), ("_v", weight.numel() // rows)):
            self.register_buffer(name, F.normalize(weight.detach().new_empty(size).normal_(), dim=0, eps=eps))
        self.current = _Pass()

    def forward(self, weight: Tensor) -> Tensor:
        normalised = self.current.weight
        # A pass entered under no_grad has no graph for a part of it that wants one.
        if normalised is None or (not normalised.requires_grad and weight.requires_grad and torch.is_grad_enabled()):
            return _normalise([self], [weight])[0]
        return normalised

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight

    def vectors(self) -> tuple[Tensor, Tensor]:
        buffers = self._buffers  # without the detour of a module's attributes: a pass asks every layer
        return buffers["_u"], buffers["_v"]

    def iterations(self) -> int:
        return self.n_power_iterations if self.training else 0

    def rows_first(self, weight: Tensor) -> Tensor:
        """Between a weight and the matrix (rows, ...) that the operators take, either way."""
        return weight.transpose(0, self.axis) if self.axis else weight


class _Scope:
    """Normalises the layers inside a module when it is entered, unless a module around it has done so."""

    def __init__(self, pairs: list[tuple[_SpectralNorm, parametrize.ParametrizationList]], depth: int):
        self.pairs, self.depth = pairs, depth

    def attach(self, module: nn.Module) -> None:
        self.hooks = (
            module.register_forward_pre_hook(self.enter),
            module.register_forward_hook(self.leave, always_call=True),
        )

    def detach(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def enter(self, module: nn.Module, inputs: tuple) -> None:
        # What a scope further out holds is in use; what this or an inner one holds was left by an interrupted pass.
        pairs = [(own, weight) for own, weight in self.pairs if (own.current.scope or self).depth >= self.depth]
        owns = [own for own, _ in pairs]
        originals = [weight._parameters["original"] for _, weight in pairs]
        for own, normalised in zip(owns, _normalise(owns, originals)):
            own.current.weight, own.current.scope = normalised, self

    def leave(self, module: nn.Module, inputs: tuple, output: object) -> None:
        for own, _ in self.pairs:
            if own.current.scope is self:
                own.current.weight = own.current.scope = None


def _own(module: nn.Module) -> _SpectralNorm | None:
    """The spectral norm of a layer's weight."""
    if not parametrize.is_parametrized(module, "weight"):
        return None
    first = module.parametrizations.weight[0]
    return first if isinstance(first, _SpectralNorm) else None


def _batches(
    owns: list[_SpectralNorm], weights: list[Tensor], key: Callable[[_SpectralNorm], Hashable]
) -> Iterator[tuple[list[int], list[Tensor], Tensor]]:
    """Layers that share a device and a key: their places in the lists, weights with rows first, flat u and v."""
    batches: dict[Hashable, list[int]] = {}
    for place, (own, weight) in enumerate(zip(owns, weights)):
        batches.setdefault((weight.device, key(own)), []).append(place)
    for places in batches.values():
        vectors = torch.cat([vector for place in places for vector in owns[place].vectors()])
        vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        yield places, [owns[place].rows_first(weights[place]) for place in places], vectors


def _normalise(owns: list[_SpectralNorm], weights: list[Tensor]) -> list[Tensor]:
    """Normalised weights, after a step of power iteration for layers in training."""
    results: list[Tensor] = [None] * len(weights)
    for places, matrices, vectors in _batches(owns, weights, lambda own: (own.iterations(), own.eps)):
        batch = [owns[place] for place in places]
        iterations = batch[0].iterations()
        normalised, vectors, _ = _kernels.spectral_norm(matrices, vectors, iterations, batch[0].eps, True)
        if iterations > 0:
            _store(batch, vectors)
        for place, own, weight in zip(places, batch, normalised):
            results[place] = own.rows_first(weight)
    return results


@torch.no_grad()
def _store(batch: list[_SpectralNorm], vectors: Tensor) -> None:
    buffers = [vector for own in batch for vector in own.vectors()]
    torch._foreach_copy_(buffers, vectors.split([vector.numel() for vector in buffers]))


def _check(name: str, layer: nn.Module) -> None:
    if parametrize.is_parametrized(layer, "weight"):
        raise ValueError(f"{name} has a parametrized weight already: remove that first")
    weight = getattr(layer, "weight", None)
    if isinstance(weight, UninitializedParameter):
        raise ValueError(f"{name} has no weight before its first forward pass: run one first")
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dim() < 2 or weight.numel() == 0:
        what = f"{weight.dtype} of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else weight
        raise TypeError(f"{name}.weight is {what}; a floating-point tensor of two dimensions or more is allowed")
