"""Registration of the spectral operators: schemas, implementations per device, fakes for torch.compile, autograd.

Operators take the weights of all layers at once, each (rows, ...), and u and v of all layers in one flat tensor: u and
v of the first, then of the second, ... The CPU goes to the C++ kernels of csrc/spectral, CUDA to its kernels where they
are built, every other device and float64 to the reference.
"""

import torch
from torch import Tensor

from iecl_fast import _library
from iecl_fast.spectral import reference

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_kernels = torch.ops.iecl_fast
_definitions = torch.library.Library("iecl_fast", "FRAGMENT")
_definitions.define(
    "spectral_norm(Tensor[] weights, Tensor vectors, int iterations, float eps, bool divide) "
    "-> (Tensor[] normalised, Tensor new_vectors, Tensor sigma)"
)
_definitions.define(
    "spectral_norm_gradient(Tensor[] gradients, Tensor[] weights, Tensor vectors, Tensor sigma) -> Tensor[]"
)


def split_vectors(vectors: Tensor, weights: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Views of u (rows,) and v (columns,) of each weight."""
    sizes = [size for weight in weights for size in (weight.shape[0], weight.numel() // weight.shape[0])]
    pieces = vectors.split(sizes)
    return list(zip(pieces[::2], pieces[1::2]))


def _dense(weight: Tensor) -> Tensor:
    """The weight, contiguous or channels-last."""
    if weight.is_contiguous():
        return weight
    if weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last):
        return weight
    if weight.dim() == 5 and weight.is_contiguous(memory_format=torch.channels_last_3d):
        return weight
    return weight.contiguous()


def _laid_out_as(tensor: Tensor, weight: Tensor) -> Tensor:
    if tensor.stride() == weight.stride() and tensor.dtype == weight.dtype:
        return tensor
    return torch.empty_like(weight).copy_(tensor)


# ---- implementations -----------------------------------------------------------------------------------------------


def _norm_by_reference(weights, vectors, iterations, eps, divide):
    results = [
        reference.spectral_norm(weight, u.to(weight.dtype), v.to(weight.dtype), iterations, eps)
        for weight, (u, v) in zip(weights, split_vectors(vectors, weights))
    ]
    new_vectors = torch.empty_like(vectors)
    torch._foreach_copy_(
        [piece for pair in split_vectors(new_vectors, weights) for piece in pair],
        [piece for _, u, v, _ in results for piece in (u, v)],
    )
    sigma = vectors.new_empty(len(weights))
    torch._foreach_copy_(list(sigma.unbind()), [sigma for *_, sigma in results])
    normalised = [_laid_out_as(result[0], _dense(weight)) for result, weight in zip(results, weights)] if divide else []
    return normalised, new_vectors, sigma


def _gradient_by_reference(gradients, weights, vectors, sigma):
    results = []
    for gradient, weight, (u, v), own in zip(gradients, weights, split_vectors(vectors, weights), sigma):
        divisor = torch.where(own == 0, torch.ones_like(own), own).to(weight.dtype)
        inner = torch.where(own == 0, torch.zeros_like(own), (gradient * weight).sum() / divisor)
        result = (gradient - (inner * torch.outer(u, v)).view_as(gradient)) / divisor
        results.append(_laid_out_as(result.to(weight.dtype), _dense(weight)))
    return results


def _implement(device_type: str, norm: str, gradient: str) -> None:
    """The named kernels for the dtypes they know, the reference for others."""

    def spectral_norm(weights, vectors, iterations, eps, divide):
        if any(weight.dtype not in KERNEL_DTYPES for weight in weights):
            return _norm_by_reference(weights, vectors, iterations, eps, divide)
        return getattr(_kernels, norm)([_dense(weight) for weight in weights], vectors, iterations, eps, divide)

    def spectral_norm_gradient(gradients, weights, vectors, sigma):
        if any(weight.dtype not in KERNEL_DTYPES for weight in weights):
            return _gradient_by_reference(gradients, weights, vectors, sigma)
        weights = [_dense(weight) for weight in weights]
        gradients = [_laid_out_as(slope, weight) for slope, weight in zip(gradients, weights)]
        return getattr(_kernels, gradient)(gradients, weights, vectors, sigma)

    _definitions.impl("spectral_norm", spectral_norm, device_type.upper())
    _definitions.impl("spectral_norm_gradient", spectral_norm_gradient, device_type.upper())


def _implement_by_reference(device_type: str) -> None:
    def spectral_norm(*arguments):
        _library.warn_reference("spectral_norm", device_type)
        return _norm_by_reference(*arguments)

    _definitions.impl("spectral_norm", spectral_norm, device_type.upper())
    _definitions.impl("spectral_norm_gradient", _gradient_by_reference, device_type.upper())


_implement("cpu", "_spectral_norm_cpu", "_spectral_norm_gradient_cpu")
if _library.cuda_missing is None:
    _implement("cuda", "_spectral_norm_cuda", "_spectral_norm_gradient_cuda")
else:
    _implement_by_reference("cuda")
for _device_type in ("mps", "xpu"):
    _implement_by_reference(_device_type)


# ---- fakes ---------------------------------------------------------------------------------------------------------


@torch.library.register_fake("iecl_fast::spectral_norm")
def _(weights, vectors, iterations, eps, divide):
    normalised = [torch.empty_like(_dense(weight)) for weight in weights] if divide else []
    return normalised, torch.empty_like(vectors), vectors.new_empty(len(weights))


@torch.library.register_fake("iecl_fast::spectral_norm_gradient")
def _(gradients, weights, vectors, sigma):
    return [torch.empty_like(_dense(weight)) for weight in weights]


# ---- autograd ------------------------------------------------------------------------------------------------------


def _context(ctx, inputs, output):
    weights, *_ = inputs
    _, new_vectors, sigma = output
    ctx.mark_non_differentiable(new_vectors, sigma)
    ctx.save_for_backward(*weights, new_vectors, sigma)
    ctx.set_materialize_grads(False)


def _backward(ctx, gradients, *_):
    *weights, vectors, sigma = ctx.saved_tensors
    # Layers that the loss does not reach, or that are frozen, are left out.
    chosen = [i for i, slope in enumerate(gradients) if slope is not None and weights[i].requires_grad]
    results = [None] * len(weights)
    if chosen:
        pairs = split_vectors(vectors, weights)
        some_vectors = vectors if len(chosen) == len(weights) else torch.cat([p for i in chosen for p in pairs[i]])
        some_sigma = sigma if len(chosen) == len(weights) else sigma[chosen]
        slopes = _kernels.spectral_norm_gradient(
            [gradients[i] for i in chosen], [weights[i] for i in chosen], some_vectors, some_sigma
        )
        for i, slope in zip(chosen, slopes):
            results[i] = slope
    return results, None, None, None, None


def _refuse_double_backward(ctx, *_):
    raise RuntimeError("iecl_fast.spectral_norm has no second derivative")


torch.library.register_autograd("iecl_fast::spectral_norm", _backward, setup_context=_context)
torch.library.register_autograd(
    "iecl_fast::spectral_norm_gradient", _refuse_double_backward, setup_context=lambda ctx, inputs, output: None
)
