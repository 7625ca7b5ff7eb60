"""Triton kernels for the gradients of the keys and of sampled similarities. All sums in a fixed order, none atomic."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from iecl_fast.ring import tiles
from iecl_fast.ring.triton_info_nce import LOG2_E, finite_or_zero, load_ring
from iecl_fast.ring.triton_order import below, order_key


# Bytes: the similarities once, 4 N K, the gradient twice, 8 K C, queries from the cache.
# Operations: 2 N K C and about 12 N K of others. Floor: the bytes.
@triton.jit
def _keys_gradient_kernel(
    similarities,
    query,
    thresholds,
    ties,
    exclude,
    temperature,
    log_denominator,
    loss_gradient,
    keys_gradient,
    num_rows,
    num_keys,
    num_channels,
    stride_query,
    stride_query_channel,
    HAS_EXCLUDE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    columns = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    channels = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)).to(tl.int64)
    inside = columns < num_keys
    channel_mask = channels < num_channels
    at = columns.to(tl.int64)[:, None] * num_channels + channels[None, :]
    mask = inside[:, None] & channel_mask[None, :]
    total = tl.load(keys_gradient + at, mask=mask, other=0.0)
    temperature = tl.load(temperature).to(tl.float64)
    factor = (1.0 / temperature * LOG2_E).to(tl.float32)
    for first in range(0, num_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        row_mask = rows < num_rows
        lower, lower_tie, upper, upper_tie, excluded = load_ring(thresholds, ties, exclude, rows, row_mask, HAS_EXCLUDE)
        shift = (tl.load(log_denominator + rows, mask=row_mask, other=0.0) * temperature).to(tl.float32)
        slope = (tl.load(loss_gradient + rows, mask=row_mask, other=0.0) / temperature).to(tl.float32)
        similarity = tl.load(
            similarities + rows.to(tl.int64)[:, None] * num_keys + columns[None, :],
            mask=row_mask[:, None] & inside[None, :],
            other=0.0,
        )
        key = order_key(similarity)
        index = columns[None, :]
        member = below(key, index, upper, upper_tie) & ~below(key, index, lower, lower_tie)
        member = member & row_mask[:, None] & (index != excluded)
        weights = tl.where(member, tl.exp2((similarity - shift[:, None]) * factor) * slope[:, None], 0.0)
        vectors = tl.load(
            query + rows.to(tl.int64)[:, None] * stride_query + channels[None, :] * stride_query_channel,
            mask=row_mask[:, None] & channel_mask[None, :],
            other=0.0,
        )
        # In float32 for 16-bit inputs too, which TF32 holds: the slope may be larger than float16 allows.
        vectors = finite_or_zero(vectors).to(tl.float32)
        total = tl.dot(tl.trans(weights), vectors, total, input_precision=PRECISION)
    tl.store(keys_gradient + at, total, mask=mask)


def add_keys_gradient(
    similarities: Tensor,
    query: Tensor,
    temperature: Tensor,
    thresholds: Tensor,
    ties: Tensor,
    exclude: Tensor | None,
    log_denominator: Tensor,
    loss_gradient: Tensor,
    keys_gradient: Tensor,
    precision: str,
) -> None:
    """Adds to keys_gradient (K, C) float32, contiguous, what the rows of query contribute.

    similarities (n, K) float32, contiguous; query (n, C), any strides; log_denominator (n,) float64; loss_gradient (n,)
    float32; the others as for triton_info_nce.weigh.
    """
    (rows, channels), num_keys = query.shape, similarities.shape[1]
    if channels == 0:
        return
    precision = "tf32" if query.dtype != torch.float32 else precision
    tile = tiles.keys_gradient(precision, channels)
    _keys_gradient_kernel[(triton.cdiv(num_keys, tile.keys), triton.cdiv(channels, tile.channels))](
        similarities,
        query,
        thresholds,
        ties,
        exclude,
        temperature,
        log_denominator,
        loss_gradient,
        keys_gradient,
        rows,
        num_keys,
        channels,
        *query.stride(),
        HAS_EXCLUDE=exclude is not None,
        ROWS=tile.rows,
        KEYS=tile.keys,
        CHANNELS=tile.channels,
        PRECISION=precision,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


# Bytes: gradient and indices once, 12 N M, and the members' keys, 2 N M C or 4 N M C, mostly from the cache: the floor.
# Operations: 2 N M C.
@triton.jit(do_not_specialize=["num_samples"])
def _sample_query_gradient_kernel(
    gradient,
    indices,
    keys,
    query_gradient,
    num_samples,
    num_channels,
    stride_key,
    stride_key_channel,
    SAMPLES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channels = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)).to(tl.int64)
    channel_mask = channels < num_channels
    total = tl.zeros([CHANNELS], tl.float32)
    for first in range(0, num_samples, SAMPLES):
        sample = first + tl.arange(0, SAMPLES)
        mask = sample < num_samples
        weight = tl.load(gradient + row * num_samples + sample, mask=mask, other=0.0)
        index = tl.load(indices + row * num_samples + sample, mask=mask, other=0)
        vectors = tl.load(
            keys + index[:, None] * stride_key + channels[None, :] * stride_key_channel,
            mask=mask[:, None] & channel_mask[None, :],
            other=0.0,
        )
        total += tl.sum(weight[:, None] * vectors.to(tl.float32), 0)
    tl.store(query_gradient + row * num_channels + channels, total, mask=channel_mask)


def sample_query_gradient(gradient: Tensor, indices: Tensor, keys: Tensor) -> Tensor:
    """(n, C) float32: sum over samples of gradient (n, M) float32 times keys (K, C), any strides, at indices (n, M)."""
    (rows, samples), channels = gradient.shape, keys.shape[1]
    query_gradient = gradient.new_empty((rows, channels))
    if query_gradient.numel() > 0:
        block = min(triton.next_power_of_2(channels), 128)
        _sample_query_gradient_kernel[(rows, triton.cdiv(channels, block))](
            gradient,
            indices,
            keys,
            query_gradient,
            samples,
            channels,
            *keys.stride(),
            SAMPLES=32,
            CHANNELS=block,
            num_warps=4,
        )
    return query_gradient


# Bytes: order and gradient once, 12 N M, a key's queries, 2 N M C or 4 N M C, from the cache, and the result, 4 K C:
# the floor. Operations: 2 N M C.
@triton.jit(do_not_specialize=["num_samples"])
def _sample_keys_gradient_kernel(
    gradient,
    order,
    begins,
    query,
    keys_gradient,
    num_samples,
    num_channels,
    stride_query,
    stride_query_channel,
    SAMPLES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    key = tl.program_id(0).to(tl.int64)
    channels = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)).to(tl.int64)
    channel_mask = channels < num_channels
    end = tl.load(begins + key + 1)
    total = tl.zeros([CHANNELS], tl.float32)
    for first in range(tl.load(begins + key), end, SAMPLES):
        sample = first + tl.arange(0, SAMPLES)
        mask = sample < end
        element = tl.load(order + sample, mask=mask, other=0)
        weight = tl.load(gradient + element, mask=mask, other=0.0)
        vectors = tl.load(
            query + (element // num_samples)[:, None] * stride_query + channels[None, :] * stride_query_channel,
            mask=mask[:, None] & channel_mask[None, :],
            other=0.0,
        )
        total += tl.sum(weight[:, None] * vectors.to(tl.float32), 0)
    tl.store(keys_gradient + key * num_channels + channels, total, mask=channel_mask)


def sample_keys_gradient(gradient: Tensor, indices: Tensor, query: Tensor, num_keys: int) -> Tensor:
    """(K, C) float32: sum over the samples of each key of gradient (n, M) float32 times query (n, C), any strides.

    A stable sort by key gives every sum a fixed order, also where a key was drawn twice.
    """
    samples, channels = gradient.shape[1], query.shape[1]
    keys_gradient = gradient.new_empty((num_keys, channels))
    if keys_gradient.numel() > 0:
        by_key, order = indices.flatten().sort(stable=True)
        begins = torch.searchsorted(by_key, torch.arange(num_keys + 1, device=indices.device))
        block = min(triton.next_power_of_2(channels), 128)
        _sample_keys_gradient_kernel[(num_keys, triton.cdiv(channels, block))](
            gradient,
            order,
            begins,
            query,
            keys_gradient,
            samples,
            channels,
            *query.stride(),
            SAMPLES=16,
            CHANNELS=block,
            num_warps=4,
        )
    return keys_gradient
