"""The Ring operators with percentiles that are data: a graph that torch.compile has made serves every value of them.

Numbers are constants of a compiled graph, so a ring that is annealed would be compiled anew at every step. Here the two
percentiles are a float64 tensor (2,) on the CPU, whatever the device of the rest: reading it waits for nothing. What is
kept of a ring has a size that depends on its percentiles, so only the loss and the draws are here, whose sizes do not.
"""

import torch

from iecl_fast.ring import ops

_kernels = torch.ops.iecl_fast
_definitions = torch.library.Library("iecl_fast", "FRAGMENT")
_definitions.define(
    "ring_draw_scheduled(Tensor query, Tensor keys, Tensor percentiles, Tensor? exclude, Tensor uniform, "
    "bool with_indices) -> (Tensor similarities, Tensor indices)"
)
_definitions.define(
    "ring_info_nce_scheduled(Tensor query, Tensor positive_key, Tensor keys, Tensor temperature, Tensor percentiles, "
    "Tensor? exclude, bool with_gradient) -> (Tensor loss, Tensor log_denominator, Tensor query_gradient)"
)
_definitions.define(
    "ring_info_nce_scheduled_keys_gradient(Tensor query, Tensor keys, Tensor temperature, Tensor percentiles, "
    "Tensor? exclude, Tensor log_denominator, Tensor loss_gradient) -> Tensor"
)
ANY_DEVICE = "CompositeExplicitAutograd"


@torch.library.impl(_definitions, "ring_draw_scheduled", ANY_DEVICE)
def _(query, keys, percentiles, exclude, uniform, with_indices):
    return _kernels.ring_sample(query, keys, *percentiles.tolist(), exclude, uniform, with_indices)


@torch.library.impl(_definitions, "ring_info_nce_scheduled", ANY_DEVICE)
def _(query, positive_key, keys, temperature, percentiles, exclude, with_gradient):
    return _kernels.ring_info_nce(query, positive_key, keys, temperature, *percentiles.tolist(), exclude, with_gradient)


@torch.library.impl(_definitions, "ring_info_nce_scheduled_keys_gradient", ANY_DEVICE)
def _(query, keys, temperature, percentiles, exclude, log_denominator, loss_gradient):
    return _kernels.ring_info_nce_keys_gradient(
        query, keys, temperature, *percentiles.tolist(), exclude, log_denominator, loss_gradient
    )


@torch.library.register_fake("iecl_fast::ring_draw_scheduled")
def _(query, keys, percentiles, exclude, uniform, with_indices):
    shape = uniform.shape
    indices = query.new_empty((shape[0] if with_indices else 0, shape[1]), dtype=torch.int64)
    return query.new_empty(shape, dtype=torch.float32), indices


@torch.library.register_fake("iecl_fast::ring_info_nce_scheduled")
def _(query, positive_key, keys, temperature, percentiles, exclude, with_gradient):
    return ops.info_nce_shapes(query, with_gradient)


@torch.library.register_fake("iecl_fast::ring_info_nce_scheduled_keys_gradient")
def _(query, keys, temperature, percentiles, exclude, log_denominator, loss_gradient):
    return keys.new_empty(keys.shape, dtype=torch.float32)


def _draw_backward(ctx, *gradients):
    return ops.sample_backward(ctx, *gradients)[:-1]


def _info_nce_context(ctx, inputs, output):
    query, positive_key, keys, temperature, percentiles, exclude, with_gradient = inputs
    ops.info_nce_context(ctx, (query, positive_key, keys, temperature, None, None, exclude, with_gradient), output)
    ctx.percentiles = (percentiles,)
    ctx.keys_gradient = _kernels.ring_info_nce_scheduled_keys_gradient


def _info_nce_backward(ctx, *gradients):
    return ops.info_nce_backward(ctx, *gradients)[:-1]


torch.library.register_autograd("iecl_fast::ring_draw_scheduled", _draw_backward, setup_context=ops.sample_context)
torch.library.register_autograd(
    "iecl_fast::ring_info_nce_scheduled", _info_nce_backward, setup_context=_info_nce_context
)
