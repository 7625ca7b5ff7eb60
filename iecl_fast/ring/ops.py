"""Registration of the Ring operators: schemas, implementations per device, fakes for torch.compile, autograd.

The CPU goes to the C++ kernels of csrc/ring, CUDA devices to the plans (dispatch.py decides), others to the reference.
Values are checked here, where the real tensors are, also under torch.compile; shapes and types in functional.py.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from iecl_fast import _library
from iecl_fast.ring import dispatch, reference
from iecl_fast.ring.percentiles import ring_ranks

_kernels = torch.ops.iecl_fast
_definitions = torch.library.Library("iecl_fast", "FRAGMENT")
_definitions.define(
    "ring_sample(Tensor query, Tensor keys, float lower, float upper, Tensor? exclude, Tensor? uniform, "
    "bool with_indices) -> (Tensor similarities, Tensor indices)"
)
_definitions.define("ring_sample_query_gradient(Tensor gradient, Tensor indices, Tensor keys) -> Tensor")
_definitions.define(
    "ring_sample_keys_gradient(Tensor gradient, Tensor indices, Tensor query, SymInt num_keys) -> Tensor"
)
_definitions.define(
    "ring_info_nce(Tensor query, Tensor positive_key, Tensor keys, Tensor temperature, float lower, float upper, "
    "Tensor? exclude, bool with_gradient) -> (Tensor loss, Tensor log_denominator, Tensor query_gradient)"
)
_definitions.define(
    "ring_info_nce_keys_gradient(Tensor query, Tensor keys, Tensor temperature, float lower, float upper, "
    "Tensor? exclude, Tensor log_denominator, Tensor loss_gradient) -> Tensor"
)


def all_ranks(lower: float, upper: float, num_keys: int, exclude: Tensor | None) -> list[int]:
    """Ranks of the ring among all keys and, for queries that exclude one, among the others."""
    if exclude is None:
        return [*ring_ranks(lower, upper, num_keys), 0, 0]
    if exclude.numel() and not (exclude.min() >= -1 and exclude.max() < num_keys):
        bad = exclude[(exclude < -1) | (exclude >= num_keys)][0].item()
        raise ValueError(f"exclude contains {bad}, which is not allowed: a key index 0..{num_keys - 1}, or -1 for none")
    some_none, some_own = bool((exclude < 0).any()), bool((exclude >= 0).any())
    all_keys = ring_ranks(lower, upper, num_keys) if some_none else (0, 0)
    others = ring_ranks(lower, upper, num_keys - 1) if some_own or not some_none else (0, 0)
    return [*all_keys, *others]


def check_temperature(temperature: float) -> None:
    """ValueError unless it is positive and finite."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature = {temperature} is not allowed: a positive number")


def _check_common_size(ranks: list[int], exclude: Tensor | None) -> None:
    first, end, first_of_rest, end_of_rest = ranks
    if (
        exclude is not None
        and (exclude < 0).any()
        and (exclude >= 0).any()
        and end - first != end_of_rest - first_of_rest
    ):
        raise ValueError(
            f"exclude mixes -1 with key indices: {end - first} keys would be kept for the one, "
            f"{end_of_rest - first_of_rest} for the other; exclude a key for every query, or for none, or draw samples"
        )


def _in_one_piece(exclude: Tensor | None) -> Tensor | None:
    """The kernels read ``exclude`` as an array; a slice or an expanded index is none."""
    return None if exclude is None else exclude.contiguous()


# ---- implementations -----------------------------------------------------------------------------------------------


@torch.library.impl(_definitions, "ring_sample", "CPU")
def _(query, keys, lower, upper, exclude, uniform, with_indices):
    ranks = all_ranks(lower, upper, keys.shape[0], exclude)
    if uniform is None:
        _check_common_size(ranks, exclude)
    return _kernels._ring_sample_cpu(query, keys, ranks, _in_one_piece(exclude), uniform, with_indices)


@torch.library.impl(_definitions, "ring_sample_query_gradient", "CPU")
def _(gradient, indices, keys):
    # Members are gathered key by key, which a channel-major layout would make one cache miss per number.
    return _kernels._ring_sample_query_gradient_cpu(gradient, indices, keys.contiguous())


@torch.library.impl(_definitions, "ring_sample_keys_gradient", "CPU")
def _(gradient, indices, query, num_keys):
    return _kernels._ring_sample_keys_gradient_cpu(gradient, indices, query, num_keys)


@torch.library.impl(_definitions, "ring_info_nce", "CPU")
def _(query, positive_key, keys, temperature, lower, upper, exclude, with_gradient):
    check_temperature(temperature.item())
    ranks = all_ranks(lower, upper, keys.shape[0], exclude)
    return _kernels._ring_info_nce_cpu(
        query, positive_key, keys, ranks, temperature.item(), _in_one_piece(exclude), with_gradient
    )


@torch.library.impl(_definitions, "ring_info_nce_keys_gradient", "CPU")
def _(query, keys, temperature, lower, upper, exclude, log_denominator, loss_gradient):
    ranks = all_ranks(lower, upper, keys.shape[0], exclude)
    return _kernels._ring_info_nce_keys_gradient_cpu(
        query, keys, ranks, temperature.item(), _in_one_piece(exclude), log_denominator, loss_gradient
    )


def _by_reference(device_type: str) -> dict[str, Callable]:
    """Plain PyTorch for devices without kernels: an implementation for the name of each operator."""

    def sample(query, keys, lower, upper, exclude, uniform, with_indices):
        _library.warn_reference("ring_sample", device_type)
        ranks = all_ranks(lower, upper, keys.shape[0], exclude)
        if uniform is None:
            _check_common_size(ranks, exclude)
        similarities, indices = reference.ring_sample(query, keys, lower, upper, exclude, uniform)
        return similarities.contiguous(), indices.contiguous() if with_indices else indices.new_empty(
            0, indices.shape[1]
        )

    def query_gradient(gradient, indices, keys):
        return torch.einsum("nm,nmc->nc", gradient, keys[indices].float())

    def keys_gradient(gradient, indices, query, num_keys):
        parts = gradient[..., None] * query.float()[:, None]
        zeros = gradient.new_zeros(num_keys, query.shape[1])
        return zeros.index_put((indices,), parts, accumulate=True)

    def info_nce(query, positive_key, keys, temperature, lower, upper, exclude, with_gradient):
        _library.warn_reference("ring_info_nce", device_type)
        all_ranks(lower, upper, keys.shape[0], exclude)
        loss = reference.ring_info_nce(query, positive_key, keys, temperature, lower, upper, exclude)
        positive = (query.float() * positive_key.float()).sum(dim=1)
        log_denominator = loss.double() + positive.double() / temperature
        if not with_gradient:
            return loss.float(), log_denominator, loss.new_empty(0, query.shape[1])
        weights = _member_weights(query, keys, temperature, lower, upper, exclude, log_denominator)
        own_weight = torch.expm1(-loss)[:, None]
        gradient = (weights @ keys.float() + own_weight * positive_key.float()) / temperature
        return loss.float(), log_denominator, gradient.float()

    def info_nce_keys_gradient(query, keys, temperature, lower, upper, exclude, log_denominator, loss_gradient):
        weights = _member_weights(query, keys, temperature, lower, upper, exclude, log_denominator)
        return ((weights * loss_gradient[:, None]).T @ query.float() / temperature).float()

    return {
        "ring_sample": sample,
        "ring_sample_query_gradient": query_gradient,
        "ring_sample_keys_gradient": keys_gradient,
        "ring_info_nce": info_nce,
        "ring_info_nce_keys_gradient": info_nce_keys_gradient,
    }


def _implement(device_type: str, implementations: dict[str, Callable]) -> None:
    for name, function in implementations.items():
        _definitions.impl(name, function, device_type.upper())


def _member_weights(query, keys, temperature, lower, upper, exclude, log_denominator):
    """Softmax weights of the ring's members, zero elsewhere: (N, K) float32."""
    similarities = reference.similarity(query, keys)
    mask = reference.member_mask(similarities, lower, upper, exclude)
    weights = torch.exp(similarities.double() / temperature - log_denominator[:, None])
    return weights.masked_fill(~mask, 0.0).float()


_implement("cuda", dispatch.with_plans(_by_reference("cuda")))
for _device_type in ("mps", "xpu"):
    _implement(_device_type, _by_reference(_device_type))


# ---- fakes ---------------------------------------------------------------------------------------------------------


@torch.library.register_fake("iecl_fast::ring_sample")
def _(query, keys, lower, upper, exclude, uniform, with_indices):
    if uniform is None:
        first, end = ring_ranks(lower, upper, keys.shape[0] - (exclude is not None))
        count = end - first
    else:
        count = uniform.shape[1]
    rows = query.shape[0]
    similarities = query.new_empty(rows, count, dtype=torch.float32)
    return similarities, query.new_empty(rows if with_indices else 0, count, dtype=torch.int64)


@torch.library.register_fake("iecl_fast::ring_sample_query_gradient")
def _(gradient, indices, keys):
    return keys.new_empty(indices.shape[0], keys.shape[1], dtype=torch.float32)


@torch.library.register_fake("iecl_fast::ring_sample_keys_gradient")
def _(gradient, indices, query, num_keys):
    return query.new_empty(num_keys, query.shape[1], dtype=torch.float32)


@torch.library.register_fake("iecl_fast::ring_info_nce")
def _(query, positive_key, keys, temperature, lower, upper, exclude, with_gradient):
    return info_nce_shapes(query, with_gradient)


def info_nce_shapes(query: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What ring_info_nce returns, without values."""
    rows, channels = query.shape
    return (
        query.new_empty(rows, dtype=torch.float32),
        query.new_empty(rows, dtype=torch.float64),
        query.new_empty(rows if with_gradient else 0, channels, dtype=torch.float32),
    )


@torch.library.register_fake("iecl_fast::ring_info_nce_keys_gradient")
def _(query, keys, temperature, lower, upper, exclude, log_denominator, loss_gradient):
    return keys.new_empty(keys.shape, dtype=torch.float32)


# ---- autograd ------------------------------------------------------------------------------------------------------


class _OnceDifferentiable(torch.autograd.Function):
    """A gradient that depends on ``sources`` in a way that is not implemented: differentiating it is an error."""

    @staticmethod
    def forward(ctx, operator: str, gradient: Tensor, *sources: Tensor) -> Tensor:
        ctx.operator = operator
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError(f"iecl_fast.{ctx.operator} has no second derivative")


def once_differentiable(operator: str, gradients: list[Tensor | None], *sources: Tensor) -> tuple[Tensor | None, ...]:
    """What a backward pass returns, so that to differentiate it once more is an error."""
    if not torch.is_grad_enabled():  # no create_graph
        return tuple(gradients)
    return tuple(None if g is None else _OnceDifferentiable.apply(operator, g, *sources) for g in gradients)


def sample_context(ctx, inputs, output):
    query, keys, *_ = inputs
    ctx.save_for_backward(query, keys, output[1])
    ctx.set_materialize_grads(False)


def sample_backward(ctx, gradient, _):
    gradients = [None] * 7
    if gradient is None:
        return tuple(gradients)
    query, keys, indices = ctx.saved_tensors
    with torch.no_grad():
        weights = gradient.float().contiguous()
        if ctx.needs_input_grad[0]:
            gradients[0] = _kernels.ring_sample_query_gradient(weights, indices, keys).to(query.dtype)
        if ctx.needs_input_grad[1]:
            gradients[1] = _kernels.ring_sample_keys_gradient(weights, indices, query, keys.shape[0]).to(keys.dtype)
    return once_differentiable("ring_sample", gradients, gradient, query, keys)


def info_nce_context(ctx, inputs, output):
    query, positive_key, keys, temperature, lower, upper, exclude, _ = inputs
    loss, log_denominator, query_gradient = output
    # Without a gradient of their own the keys have done their part: a queue may take new ones before the backward pass.
    of_keys = (keys, exclude, log_denominator) if ctx.needs_input_grad[2] else (None, None, None)
    ctx.save_for_backward(query, positive_key, temperature, loss, query_gradient, *of_keys)
    ctx.percentiles = lower, upper
    ctx.keys_gradient = _kernels.ring_info_nce_keys_gradient
    ctx.mark_non_differentiable(log_denominator, query_gradient)
    ctx.set_materialize_grads(False)


def info_nce_backward(ctx, gradient, *_):
    gradients = [None] * 8
    if gradient is None:
        return tuple(gradients)
    query, positive_key, temperature, loss, row_gradient, keys, exclude, log_denominator = ctx.saved_tensors
    needs_query, needs_positive, needs_keys, needs_temperature, *_ = ctx.needs_input_grad
    with torch.no_grad():
        if needs_query:
            gradients[0] = (gradient[:, None] * row_gradient).to(query.dtype)
        if needs_positive:
            # The softmax weight of the positive is exp(-loss).
            factor = gradient * torch.expm1(-loss) / temperature
            gradients[1] = (factor[:, None] * query).to(positive_key.dtype)
        if needs_keys:
            gradients[2] = ctx.keys_gradient(
                query, keys, temperature, *ctx.percentiles, exclude, log_denominator, gradient.float().contiguous()
            ).to(keys.dtype)
        if needs_temperature:
            # d loss / dT = -(mean similarity under the softmax - positive similarity) / T^2
            #            = -(query . d loss / d query) / T
            slope = (gradient[:, None] * row_gradient * query).sum(dtype=torch.float64)
            gradients[3] = (-slope / temperature).to(temperature.dtype).reshape(temperature.shape)
    sources = [source for source in (query, positive_key, keys, temperature) if source is not None]
    return once_differentiable("ring_info_nce", gradients, gradient, *sources)


torch.library.register_autograd("iecl_fast::ring_sample", sample_backward, setup_context=sample_context)
torch.library.register_autograd("iecl_fast::ring_info_nce", info_nce_backward, setup_context=info_nce_context)
