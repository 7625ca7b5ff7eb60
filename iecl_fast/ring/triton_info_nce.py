"""Triton kernels of plan C: similarities written once, then read by the pass that weighs the ring's members.

The exponentials are shifted by the largest member so far, as in Milakov and Gimelshein, "Online normalizer calculation
for softmax", so that they are at most 1 at any temperature. That member is kept as an order key, which a NaN cannot
slip past. Every sum has a fixed order: nothing is added atomically.
"""

import triton
import triton.language as tl
from torch import Tensor

from iecl_fast.ring import tiles
from iecl_fast.ring.triton_combine import Parts, combine
from iecl_fast.ring.triton_order import LOWEST_KEY, below, load_boundary, order_key, similarity_of

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def product_tile(
    query,
    keys,
    rows,
    columns,
    num_rows,
    num_keys,
    num_channels,
    stride_row,
    stride_row_channel,
    stride_key,
    stride_key_channel,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Similarities (ROWS, KEYS) float32 of a tile; 0 outside. Offsets are 64-bit: a bank may have 2^31 numbers."""
    rows_at = rows.to(tl.int64)[:, None] * stride_row
    columns_at = columns.to(tl.int64)[None, :] * stride_key
    similarities = tl.zeros([ROWS, KEYS], tl.float32)
    for first in range(0, num_channels, CHANNELS):
        channels = (first + tl.arange(0, CHANNELS)).to(tl.int64)
        inside = channels < num_channels
        a = tl.load(
            query + rows_at + channels[None, :] * stride_row_channel,
            mask=(rows < num_rows)[:, None] & inside[None, :],
            other=0.0,
        )
        b = tl.load(
            keys + columns_at + channels[:, None] * stride_key_channel,
            mask=(columns < num_keys)[None, :] & inside[:, None],
            other=0.0,
        )
        similarities = tl.dot(a, b, similarities, input_precision=PRECISION)
    return similarities


# Bytes: the keys once, 2 K C, and the similarities once, 4 N K. Operations: 2 N K C. Floor: the similarities' bytes.
@triton.jit
def _product_kernel(
    query,
    keys,
    similarities,
    num_rows,
    num_keys,
    num_channels,
    stride_row,
    stride_row_channel,
    stride_key,
    stride_key_channel,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row_blocks = tl.cdiv(num_rows, ROWS)  # one after another, so that they find a tile's keys in the cache
    rows = tl.program_id(0) % row_blocks * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) // row_blocks * KEYS + tl.arange(0, KEYS)
    values = product_tile(
        query,
        keys,
        rows,
        columns,
        num_rows,
        num_keys,
        num_channels,
        stride_row,
        stride_row_channel,
        stride_key,
        stride_key_channel,
        ROWS,
        KEYS,
        CHANNELS,
        PRECISION,
    )
    at = rows.to(tl.int64)[:, None] * num_keys + columns[None, :]
    tl.store(similarities + at, values, mask=(rows < num_rows)[:, None] & (columns < num_keys)[None, :])


def write_similarities(query: Tensor, keys: Tensor, similarities: Tensor, precision: str) -> None:
    """Writes query (n, C) times keys (K, C), any strides, to similarities (n, K) float32, contiguous."""
    (rows, channels), num_keys = query.shape, keys.shape[0]
    tile = tiles.product(query.dtype, channels)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(num_keys, tile.keys),)
    _product_kernel[grid](
        query,
        keys,
        similarities,
        rows,
        num_keys,
        channels,
        *query.stride(),
        *keys.stride(),
        ROWS=tile.rows,
        KEYS=tile.keys,
        CHANNELS=tile.channels,
        PRECISION=precision,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit
def finite_or_zero(values):
    """Zero in place of what is not finite: a key of no weight must not make 0 * inf of the sum.

    Nothing is lost. Where such a key is a member, its similarity is -inf and it has no weight, or it is +inf or NaN,
    and then the weights themselves are NaN.
    """
    return tl.where(tl.abs(values) < float("inf"), values, 0.0)


@triton.jit
def load_excluded(exclude, rows, mask, HAS_EXCLUDE: tl.constexpr):
    """The key that each row excludes, -1 for none."""
    excluded = tl.full(rows.shape, -1, tl.int32)
    if HAS_EXCLUDE:
        excluded = tl.load(exclude + rows, mask=mask, other=-1).to(tl.int32)
    return excluded


@triton.jit
def load_ring(thresholds, ties, exclude, rows, mask, HAS_EXCLUDE: tl.constexpr):
    """Both boundaries and the excluded key of some rows, as columns."""
    lower, lower_tie = load_boundary(thresholds, ties, rows.to(tl.int64) * 2, mask)
    upper, upper_tie = load_boundary(thresholds, ties, rows.to(tl.int64) * 2 + 1, mask)
    excluded = load_excluded(exclude, rows, mask, HAS_EXCLUDE)
    return lower[:, None], lower_tie[:, None], upper[:, None], upper_tie[:, None], excluded[:, None]


@triton.jit
def rescale(key, member, largest, factor):
    """Takes a tile's members into account: their new largest order keys, shifts, and the factor of sums so far."""
    new_largest = tl.maximum(largest, tl.max(tl.where(member, key, LOWEST_KEY), 1))
    shift = similarity_of(new_largest)
    # With no member but -inf there is nothing to scale, and -inf - -inf would be NaN.
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    return new_largest, shift, tl.exp2((similarity_of(largest) - shift) * factor)


# Bytes: the similarities once, 4 N K, the keys once for each block of rows (from the cache but for the first), 2 K C or
# 4 K C, and partial sums 4 S N C. Operations: 2 N K C and about 14 N K of others. Floor: the similarities' bytes.
@triton.jit(do_not_specialize=["split_tiles"])
def _weigh_kernel(
    similarities,
    keys,
    thresholds,
    ties,
    exclude,
    temperature,
    largest_members,
    sums,
    weighted_sums,
    num_rows,
    num_keys,
    num_channels,
    stride_key,
    stride_key_channel,
    split_tiles,
    HAS_EXCLUDE: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    channels = (tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)).to(tl.int64)
    row_mask = rows < num_rows
    lower, lower_tie, upper, upper_tie, excluded = load_ring(thresholds, ties, exclude, rows, row_mask, HAS_EXCLUDE)
    factor = (1.0 / tl.load(temperature).to(tl.float64) * LOG2_E).to(tl.float32)
    rows_at = rows.to(tl.int64)[:, None] * num_keys

    largest = tl.full([ROWS], LOWEST_KEY, tl.int32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, CHANNELS], tl.float32)
    begin = split * split_tiles * KEYS
    for start in range(begin, tl.minimum(begin + split_tiles * KEYS, num_keys), KEYS):
        columns = start + tl.arange(0, KEYS)
        inside = columns < num_keys
        similarity = tl.load(
            similarities + rows_at + columns[None, :], mask=row_mask[:, None] & inside[None, :], other=0.0
        )
        key = order_key(similarity)
        index = columns[None, :]
        member = below(key, index, upper, upper_tie) & ~below(key, index, lower, lower_tie)
        member = member & inside[None, :] & (index != excluded)
        largest, shift, scale = rescale(key, member, largest, factor)
        weights = tl.where(member, tl.exp2((similarity - shift[:, None]) * factor), 0.0)
        total = total * scale + tl.sum(weights, 1)
        if WITH_GRADIENT:
            key_vectors = tl.load(
                keys + columns.to(tl.int64)[:, None] * stride_key + channels[None, :] * stride_key_channel,
                mask=inside[:, None] & (channels < num_channels)[None, :],
                other=0.0,
            )
            key_vectors = finite_or_zero(key_vectors)
            weighted = tl.dot(
                weights.to(key_vectors.dtype), key_vectors, weighted * scale[:, None], input_precision=PRECISION
            )

    at = split.to(tl.int64) * num_rows + rows
    if tl.program_id(2) == 0:
        tl.store(largest_members + at, largest, mask=row_mask)
        tl.store(sums + at, total, mask=row_mask)
    if WITH_GRADIENT:
        tl.store(
            weighted_sums + at[:, None] * num_channels + channels[None, :],
            weighted,
            mask=row_mask[:, None] & (channels < num_channels)[None, :],
        )


def weigh(
    similarities: Tensor,
    query: Tensor,
    positive_key: Tensor,
    keys: Tensor,
    temperature: Tensor,
    thresholds: Tensor,
    ties: Tensor,
    exclude: Tensor | None,
    precision: str,
    loss: Tensor,
    log_denominator: Tensor,
    query_gradient: Tensor,
) -> None:
    """Writes loss (n,) float32, log_denominator (n,) float64 and, unless it is empty, query_gradient (n, C) float32.

    similarities (n, K) float32, contiguous; query and positive_key (n, C), keys (K, C), any strides; boundaries as from
    triton_select; temperature: one floating-point element on the device.
    """
    (rows, channels), num_keys = query.shape, keys.shape[0]
    with_gradient = len(query_gradient) > 0
    tile = tiles.weigh(query.dtype, precision, channels)
    split_tiles = tiles.split_tiles(rows, num_keys, tile)
    splits = triton.cdiv(num_keys, split_tiles * tile.keys)
    parts = Parts.empty(query, splits, rows, channels, with_gradient)
    channel_blocks = triton.cdiv(channels, tile.channels) if with_gradient else 1
    _weigh_kernel[(triton.cdiv(rows, tile.rows), splits, max(channel_blocks, 1))](
        similarities,
        keys,
        thresholds,
        ties,
        exclude,
        temperature,
        *parts,
        rows,
        num_keys,
        channels,
        *keys.stride(),
        split_tiles,
        HAS_EXCLUDE=exclude is not None,
        WITH_GRADIENT=with_gradient,
        ROWS=tile.rows,
        KEYS=tile.keys,
        CHANNELS=tile.channels,
        PRECISION=precision,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    combine(parts, query, positive_key, temperature, loss, log_denominator, query_gradient)
