"""Registration of the SAIB operators: schemas, implementations per device, fakes for torch.compile, autograd.

An implementation is a module with three functions: ``forward`` and ``backward`` with the operators' arguments, and
``empty_saved``, tensors like those that its forward pass keeps for the backward pass. What those are, and how they lie
in memory, is its own affair.
"""

import torch
from torch import Tensor

from iecl_fast import _library
from iecl_fast.saib import cpu, plain

_kernels = torch.ops.iecl_fast
_definitions = torch.library.Library("iecl_fast", "FRAGMENT")
_definitions.define(
    "saib(Tensor x, Tensor? position, Tensor w1, Tensor w2, Tensor w3, Tensor? w4, int patch_size, "
    "bool channels_are_batch, str activation, str expansion, bool save) -> (Tensor output, Tensor[] saved)"
)
_definitions.define(
    "saib_backward(Tensor gradient, Tensor x, Tensor? position, Tensor w1, Tensor w2, Tensor w3, Tensor? w4, "
    "Tensor[] saved, int patch_size, bool channels_are_batch, str activation, str expansion, bool[6] needs) "
    "-> Tensor[] gradients"
)

# ---- implementations -----------------------------------------------------------------------------------------------


def _implementation(device_type: str, dtype: torch.dtype, expansion: str):
    """The module that serves such tensors."""
    return cpu if device_type == "cpu" and dtype == torch.float32 else plain


def _implement(device_type: str, key: str) -> None:
    """Under a dispatch key, what serves tensors of a device."""

    def saib(x, *arguments):
        *_, expansion, _ = arguments
        module = _implementation(device_type, x.dtype, expansion)
        if module is plain and device_type != "cpu":
            _library.warn_reference("saib", device_type)
        return module.forward(x, *arguments)

    def saib_backward(gradient, x, *arguments):
        *_, expansion, _ = arguments
        return _implementation(device_type, x.dtype, expansion).backward(gradient, x, *arguments)

    _definitions.impl("saib", saib, key)
    _definitions.impl("saib_backward", saib_backward, key)


for _device_type in ("cpu", "cuda", "mps", "xpu"):
    _implement(_device_type, _device_type.upper())


# ---- autocast ------------------------------------------------------------------------------------------------------


def _implement_autocast(device_type: str) -> None:
    """The forward pass runs in the autocast dtype, as conv2d does, the backward pass in that of the forward pass."""

    def saib(x, position, w1, w2, w3, w4, *options):
        dtype = torch.get_autocast_dtype(device_type)

        def cast(tensor: Tensor | None) -> Tensor | None:
            return tensor if tensor is None or tensor.dtype == torch.float64 else tensor.to(dtype)

        with torch.autocast(device_type, enabled=False):
            return _kernels.saib(*(cast(tensor) for tensor in (x, position, w1, w2, w3, w4)), *options)

    def saib_backward(*arguments):
        with torch.autocast(device_type, enabled=False):
            return _kernels.saib_backward(*arguments)

    key = f"Autocast{device_type.upper()}"
    _definitions.impl("saib", saib, key)
    _definitions.impl("saib_backward", saib_backward, key)


for _device_type in ("cpu", "cuda"):
    _implement_autocast(_device_type)


# ---- fakes ---------------------------------------------------------------------------------------------------------


@torch.library.register_fake("iecl_fast::saib")
def _(x, position, w1, w2, w3, w4, patch_size, channels_are_batch, activation, expansion, save):
    module = _implementation(x.device.type, x.dtype, expansion)
    saved = module.empty_saved(x, w1, patch_size, channels_are_batch, activation, expansion) if save else []
    return torch.empty_like(x), saved


@torch.library.register_fake("iecl_fast::saib_backward")
def _(gradient, x, position, w1, w2, w3, w4, saved, *options):
    tensors = (x, position, w1, w2, w3, w4)
    return [torch.empty_like(tensor) for tensor, needed in zip(tensors, options[-1]) if needed]


# ---- autograd ------------------------------------------------------------------------------------------------------


class _OnceDifferentiable(torch.autograd.Function):
    """A gradient that depends on ``sources`` in a way that is not implemented: differentiating it is an error."""

    @staticmethod
    def forward(ctx, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError("iecl_fast.saib has no second derivative")


def _context(ctx, inputs, output):
    *tensors, patch_size, channels_are_batch, activation, expansion, save = inputs
    _, saved = output
    if not save:
        raise RuntimeError("iecl_fast.saib was called with save = False, but a gradient is wanted")
    ctx.options = patch_size, channels_are_batch, activation, expansion
    ctx.save_for_backward(*tensors, *saved)
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)


def _backward(ctx, gradient, *_):
    results: list[Tensor | None] = [None] * 11
    if gradient is None:
        return tuple(results)
    tensors, saved = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
    needs = [tensor is not None and bool(needed) for tensor, needed in zip(tensors, ctx.needs_input_grad)]
    with torch.no_grad():
        gradients = _kernels.saib_backward(gradient, *tensors, list(saved), *ctx.options, needs)
    places = [place for place, needed in enumerate(needs) if needed]
    sources = [gradient, *(tensor for tensor in tensors if tensor is not None)]
    for place, own in zip(places, gradients):
        # With create_graph the gradient is part of a graph.
        results[place] = _OnceDifferentiable.apply(own, *sources) if torch.is_grad_enabled() else own
    return tuple(results)


torch.library.register_autograd("iecl_fast::saib", _backward, setup_context=_context)
