"""The public functions of Ring: arguments checked, then one operator."""

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad

import iecl_fast.ring.scheduled  # noqa: F401  (registers the operators)
from iecl_fast.ring.ops import check_temperature

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def ring_sample(
    query: Tensor,
    queue: Tensor,
    lower: float | Tensor,
    upper: float | Tensor,
    *,
    num_samples: int | None = None,
    exclude: Tensor | None = None,
    generator: torch.Generator | None = None,
    return_indices: bool = False,
    layout: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Similarities of each query with the stored keys between two percentiles of similarity: its Ring negatives.

    Wu et al., "Conditional Negative Sampling for Contrastive Learning of Visual Representations", section 4: hard
    negatives, without the very closest. Of K candidate keys in ascending order of similarity those with the ranks
    ``ceil(lower * K / 100) .. ceil(upper * K / 100) - 1`` are kept, M of them. Equal similarities rank by key index,
    NaN ranks highest and -0.0 equals 0.0: the set is that of ``argsort(stable=True)``, on every device, in every run.

    Args:
        query: (N, C), float32, float16 or bfloat16, any strides.
        queue: (K, C), or MoCo's (C, K), same dtype and device, any strides, never copied. A square queue is (K, C).
        lower, upper: percentiles, ``0 <= lower < upper <= 100``, taken as the decimal numbers they are written as.
            ``lower=0, upper=100`` keeps all keys. With ``num_samples`` they may be float64 tensors without dimension on
            the CPU: torch.compile takes numbers for constants, and compiles anew when they change; tensors it does not.
        num_samples: return so many members for each query, drawn uniformly with replacement (the paper's memory-bank
            setting), instead of all. Needs no memory of the size N x K.
        exclude: (N,) int64, index of a key that is no candidate for the query, such as its own entry in a memory bank,
            -1 for none. Percentiles are then of the other K - 1 keys.
        generator: for the draws of ``num_samples``, on query's device.
        return_indices: also return which keys they are.
        layout: "KC" or "CK" states the layout of ``queue`` where its shape leaves it open.

    Returns:
        Similarities (N, M) or (N, num_samples) in query's dtype, ordered by key index (first in, first out) or in the
        order of the draws; differentiable in query and queue. Dot products are accumulated in float32, and ranked as
        such. With ``return_indices`` a pair of them and of int64 indices of the same shape.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed, also if no key lies in the ring.
    """
    keys = as_keys(query, queue, "queue", layout)
    check_keys(query, keys, "queue", exclude)
    _refuse_tangents("ring_sample", query, keys)
    uniform = None
    if num_samples is not None:
        if num_samples < 1:
            raise ValueError(f"num_samples = {num_samples} is not allowed: at least 1")
        shape = (query.shape[0], num_samples)
        uniform = torch.rand(shape, generator=generator, device=query.device, dtype=torch.float64)
    needs_gradient = torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad)
    operator, percentiles = torch.ops.iecl_fast.ring_sample, (lower, upper)
    if isinstance(lower, Tensor) or isinstance(upper, Tensor):
        if uniform is None:
            raise TypeError("lower or upper is a tensor; numbers are allowed without num_samples")
        operator, percentiles = torch.ops.iecl_fast.ring_draw_scheduled, _as_data(lower, upper)
    similarities, indices = operator(query, keys, *percentiles, exclude, uniform, return_indices or needs_gradient)
    similarities = similarities.to(query.dtype)
    return (similarities, indices) if return_indices else similarities


def ring_info_nce(
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor,
    *,
    lower: float | Tensor = 0.0,
    upper: float | Tensor = 100.0,
    temperature: float | Tensor = 0.07,
    exclude: Tensor | None = None,
    reduction: str = "mean",
    layout: str | None = None,
) -> Tensor:
    """InfoNCE with Ring negatives, without ever holding the N x K similarities.

    ``-log(exp(q.k / T) / (exp(q.k / T) + sum over the ring of exp(q.n / T)))``: van den Oord et al., "Representation
    Learning with Contrastive Predictive Coding", eq. 4, with the negatives of :func:`ring_sample`. The positive is
    always in the denominator. ``lower=0, upper=100`` is the plain loss over all keys.

    Deterministic: the same inputs give the same bits, forward and backward, on any number of threads. Finite for finite
    inputs at any temperature from 1e-3 on, as long as sums of similarities and of keys stay in float32's range. Has no
    second derivative.

    Args:
        query, positive_key: (N, C), float32, float16 or bfloat16, any strides.
        negative_keys: (K, C), or MoCo's (C, K), same dtype and device, any strides, never copied.
        lower, upper, exclude, layout: as in :func:`ring_sample`; the percentiles may be tensors in any case.
        temperature: positive number, or a tensor with one element (a learned temperature).
        reduction: "mean", "sum", or "none" for the loss of each query.

    Returns:
        float32 scalar, or (N,). Differentiable in query, positive_key, temperature and negative_keys.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed, also if no key lies in the ring.
    """
    keys = as_keys(query, negative_keys, "negative_keys", layout)
    check_keys(query, keys, "negative_keys", exclude)
    check_positive(query, positive_key)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction = {reduction!r} is not allowed: 'mean', 'sum' or 'none'")
    if not isinstance(temperature, Tensor):
        check_temperature(temperature)
        temperature = torch.full((), temperature, dtype=torch.float64, device=query.device)
    elif temperature.numel() != 1 or not temperature.is_floating_point() or temperature.device != query.device:
        raise ValueError(
            f"temperature is a {temperature.dtype} tensor of shape {tuple(temperature.shape)} on {temperature.device}; "
            f"one floating-point element on {query.device} is allowed"
        )
    elif temperature.is_cuda:  # without waiting for the device; on the CPU the operator looks
        torch._assert_async(
            ((temperature > 0) & (temperature < math.inf)).all(), "temperature is not allowed: a positive number"
        )
    inputs = (query, positive_key, keys, temperature.reshape(()))
    _refuse_tangents("ring_info_nce", *inputs)
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    operator, percentiles = torch.ops.iecl_fast.ring_info_nce, (lower, upper)
    if isinstance(lower, Tensor) or isinstance(upper, Tensor):
        operator, percentiles = torch.ops.iecl_fast.ring_info_nce_scheduled, _as_data(lower, upper)
    loss, *_ = operator(*inputs, *percentiles, exclude, needs_gradient)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _as_data(lower: float | Tensor, upper: float | Tensor) -> tuple[Tensor]:
    """Two percentiles, of which one is a tensor, as the one argument of a scheduled operator."""
    tensors = [torch.as_tensor(value, dtype=torch.float64) for value in (lower, upper)]
    for name, value, tensor in zip(("lower", "upper"), (lower, upper), tensors):
        if (
            tensor.dim() > 0
            or tensor.device.type != "cpu"
            or (isinstance(value, Tensor) and value.dtype != tensor.dtype)
        ):
            raise TypeError(
                f"{name} is a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}; a number, or a "
                "float64 tensor without dimension on the CPU is allowed"
            )
    return (torch.stack(tensors),)


def as_keys(query: Tensor, queue: Tensor, name: str, layout: str | None) -> Tensor:
    """A (K, C) view of the stored keys."""
    for tensor, argument in ((query, "query"), (queue, name)):
        _check_tensor(tensor, argument)
        if tensor.dim() != 2:
            raise ValueError(f"{argument} has the shape {tuple(tensor.shape)}; a matrix is allowed")
    channels = query.shape[1]
    if layout is None:
        layout = "KC" if queue.shape[1] == channels else "CK"
    elif layout not in ("KC", "CK"):
        raise ValueError(f"layout = {layout!r} is not allowed: 'KC', 'CK' or None")
    keys = queue if layout == "KC" else queue.T
    if keys.shape[1] != channels:
        raise ValueError(
            f"{name} has the shape {tuple(queue.shape)}; (K, {channels}) or ({channels}, K) is allowed, "
            f"with the {channels} channels of query {tuple(query.shape)}"
        )
    return keys


def _check_tensor(value: object, name: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; a tensor is allowed")


def _check_alike(query: Tensor, other: Tensor, name: str) -> None:
    if other.dtype != query.dtype:
        raise TypeError(f"{name} is {other.dtype}; query's dtype is allowed, {query.dtype}")
    if other.device != query.device:
        raise ValueError(f"{name} is on {other.device}; query's device is allowed, {query.device}")


def check_positive(query: Tensor, positive_key: Tensor) -> None:
    """ValueError or TypeError unless the positive keys are as the queries: shape, dtype, device."""
    _check_tensor(positive_key, "positive_key")
    if positive_key.shape != query.shape:
        raise ValueError(
            f"positive_key has the shape {tuple(positive_key.shape)}; query's shape is allowed, {tuple(query.shape)}"
        )
    _check_alike(query, positive_key, "positive_key")


def check_keys(query: Tensor, keys: Tensor, name: str, exclude: Tensor | None) -> None:
    """ValueError or TypeError unless queries (N, C), keys (K, C), called ``name``, and ``exclude`` go together."""
    if query.dtype not in DTYPES:
        raise TypeError(f"query is {query.dtype}; {', '.join(map(str, DTYPES))} are allowed")
    _check_alike(query, keys, name)
    if exclude is None:
        return
    _check_tensor(exclude, "exclude")
    if exclude.dtype != torch.int64:
        raise TypeError(f"exclude is {exclude.dtype}; torch.int64 is allowed")
    if exclude.shape != query.shape[:1]:
        raise ValueError(f"exclude has the shape {tuple(exclude.shape)}; ({query.shape[0]},) is allowed")
    if exclude.device != query.device:
        raise ValueError(f"exclude is on {exclude.device}; query's device is allowed, {query.device}")


def _refuse_tangents(operator: str, *tensors: Tensor) -> None:
    """Custom operators drop the tangents of forward-mode differentiation without a word."""
    if torch.compiler.is_compiling() or getattr(forward_ad, "_current_level", -1) < 0:
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise RuntimeError(f"iecl_fast.{operator} has no forward-mode derivative; use backward()")
