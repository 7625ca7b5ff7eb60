"""Triton kernels of plan B': similarities formed anew in every pass, never written; of 16-bit inputs.

Why all passes agree on who is a member, bit for bit: :func:`tile_similarities` alone forms similarities, and every
kernel calls it with the same tile, the same number of warps and operands of the same types. So the compiler has one way
to lay a tile out and takes the same matrix instruction, which adds a key's channels in the same order to an accumulator
that starts at zero; what one element of a product becomes depends on its row and its column alone. A similarity is
therefore the same float32 number in each pass, and from there on all is integers (triton_order). That the instructions
are the same is read from the compiled code by the tests; that the numbers are is checked in every call: the last pass
counts the members it weighed, and a row where the count is not the ring's size goes to triton_fall_back.
"""

import triton
import triton.language as tl

from iecl_fast.ring.triton_info_nce import LOG2_E, load_excluded, load_ring, rescale
from iecl_fast.ring.triton_order import LOWEST_KEY, below, order_key


@triton.jit
def load_queries(query, rows, channels, num_rows, num_channels, stride_row, stride_row_channel):
    """(ROWS, CHANNELS), zero outside."""
    at = rows.to(tl.int64)[:, None] * stride_row + channels.to(tl.int64)[None, :] * stride_row_channel
    return tl.load(query + at, mask=(rows < num_rows)[:, None] & (channels < num_channels)[None, :], other=0.0)


@triton.jit
def tile_similarities(queries, keys, columns, channels, num_keys, num_channels, stride_key, stride_key_channel):
    """Similarities (ROWS, KEYS) float32 of queries with the keys ``columns``, and these (KEYS, CHANNELS)."""
    at = columns.to(tl.int64)[:, None] * stride_key + channels.to(tl.int64)[None, :] * stride_key_channel
    inside = (columns < num_keys)[:, None] & (channels < num_channels)[None, :]
    key_vectors = tl.load(keys + at, mask=inside, other=0.0)
    return tl.dot(queries, tl.trans(key_vectors)), key_vectors


# Bytes: 4 m written, their floor. Operations: about 20 m.
@triton.jit
def _sample_keys_kernel(sample_keys, num_keys, size, BLOCK: tl.constexpr):
    """One key of each of ``size`` cells of the queue, at a hashed place: a fixed stride would meet periodic copies."""
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin = cell.to(tl.int64) * num_keys // size
    width = (cell + 1).to(tl.int64) * num_keys // size - begin
    # The finaliser of MurmurHash3 (Appleby).
    bits = cell.to(tl.uint32) ^ 0x9E3779B9
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    bits = bits ^ (bits >> 16)
    key = begin + bits.to(tl.int64) % tl.maximum(width, 1)
    # The one behind the last stands for the end of the queue.
    tl.store(sample_keys + cell, tl.where(cell < size, key, num_keys), mask=cell <= size)


# Bytes: the sample's keys, 2 m C, and its similarities, 4 N m. Operations: 2 N m C. Floor: the similarities' bytes.
@triton.jit
def _sample_kernel(
    query,
    keys,
    sample_keys,
    similarities,
    num_rows,
    num_keys,
    num_channels,
    size,
    stride_row,
    stride_row_channel,
    stride_key,
    stride_key_channel,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cells = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    channels = tl.arange(0, CHANNELS)
    queries = load_queries(query, rows, channels, num_rows, num_channels, stride_row, stride_row_channel)
    columns = tl.load(sample_keys + cells, mask=cells < size, other=0)
    values, _ = tile_similarities(
        queries, keys, columns, channels, num_keys, num_channels, stride_key, stride_key_channel
    )
    at = rows.to(tl.int64)[:, None] * size + cells[None, :]
    tl.store(similarities + at, values, mask=(rows < num_rows)[:, None] & (cells < size)[None, :])


@triton.jit
def load_edge(thresholds, ties, sample_keys, rows, side, mask):
    """One edge of a bracket as columns: a boundary whose tie is the index of a sampled key."""
    at = rows.to(tl.int64) * 2 + side
    threshold = tl.load(thresholds + at, mask=mask, other=0)
    cell = tl.load(ties + at, mask=mask, other=0)
    tie = tl.load(sample_keys + cell, mask=mask, other=0)
    return tl.maximum(threshold, LOWEST_KEY + 1)[:, None], tie[:, None]


# Bytes: the keys once for each block of rows, 2 K C from memory. Operations: 2 N K C and about 20 N K of others. Floor:
# the operations.
@triton.jit(do_not_specialize=["split_tiles"])
def _count_kernel(
    query,
    keys,
    sample_keys,
    lower_thresholds,
    lower_ties,
    upper_thresholds,
    upper_ties,
    exclude,
    counts,
    num_rows,
    num_keys,
    num_channels,
    stride_row,
    stride_row_channel,
    stride_key,
    stride_key_channel,
    split_tiles,
    HAS_EXCLUDE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Keys of a split below each of the four edges: counts (splits, n, 4) int32."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    channels = tl.arange(0, CHANNELS)
    row_mask = rows < num_rows
    queries = load_queries(query, rows, channels, num_rows, num_channels, stride_row, stride_row_channel)
    edge_0, tie_0 = load_edge(lower_thresholds, lower_ties, sample_keys, rows, 0, row_mask)
    edge_1, tie_1 = load_edge(lower_thresholds, lower_ties, sample_keys, rows, 1, row_mask)
    edge_2, tie_2 = load_edge(upper_thresholds, upper_ties, sample_keys, rows, 0, row_mask)
    edge_3, tie_3 = load_edge(upper_thresholds, upper_ties, sample_keys, rows, 1, row_mask)
    excluded = load_excluded(exclude, rows, row_mask, HAS_EXCLUDE)
    count_0 = tl.zeros([ROWS], tl.int32)
    count_1 = tl.zeros([ROWS], tl.int32)
    count_2 = tl.zeros([ROWS], tl.int32)
    count_3 = tl.zeros([ROWS], tl.int32)
    begin = split * split_tiles * KEYS
    for start in range(begin, tl.minimum(begin + split_tiles * KEYS, num_keys), KEYS):
        columns = start + tl.arange(0, KEYS)
        similarity, _ = tile_similarities(
            queries, keys, columns, channels, num_keys, num_channels, stride_key, stride_key_channel
        )
        key = order_key(similarity)
        index = columns[None, :]
        # Four counts of at most 128 in one number.
        packed = below(key, index, edge_0, tie_0).to(tl.uint32)
        packed += below(key, index, edge_1, tie_1).to(tl.uint32) << 8
        packed += below(key, index, edge_2, tie_2).to(tl.uint32) << 16
        packed += below(key, index, edge_3, tie_3).to(tl.uint32) << 24
        valid = (columns < num_keys)[None, :] & (index != excluded[:, None])
        total = tl.sum(tl.where(valid, packed, 0), 1)
        count_0 += (total & 255).to(tl.int32)
        count_1 += ((total >> 8) & 255).to(tl.int32)
        count_2 += ((total >> 16) & 255).to(tl.int32)
        count_3 += (total >> 24).to(tl.int32)
    at = counts + (split.to(tl.int64) * num_rows + rows) * 4
    tl.store(at, count_0, mask=row_mask)
    tl.store(at + 1, count_1, mask=row_mask)
    tl.store(at + 2, count_2, mask=row_mask)
    tl.store(at + 3, count_3, mask=row_mask)


# Bytes: the counts once and the offsets, 20 S N: the floor. Operations: a few for each of them.
@triton.jit(do_not_specialize=["lower", "upper", "lower_of_rest", "upper_of_rest", "splits", "capacity"])
def _place_kernel(
    counts,
    exclude,
    offsets,
    candidate_ranks,
    candidate_counts,
    missed,
    num_rows,
    num_keys,
    splits,
    capacity,
    lower,
    upper,
    lower_of_rest,
    upper_of_rest,
    HAS_EXCLUDE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Where a row's candidates of each split go, the two ranks among them, and whether both brackets hit."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS).to(tl.int64)
    mask = split < splits
    at = counts + (split * num_rows + row) * 4
    count_0 = tl.load(at, mask=mask, other=0)
    count_1 = tl.load(at + 1, mask=mask, other=0)
    count_2 = tl.load(at + 2, mask=mask, other=0)
    count_3 = tl.load(at + 3, mask=mask, other=0)
    # The edges ascend within a bracket and from one to the other, but the brackets may overlap.
    candidates = count_1 - count_0 + count_3 - tl.maximum(count_1, count_2)
    tl.store(offsets + split * num_rows + row, tl.cumsum(candidates, 0) - candidates, mask=mask)

    total = num_keys
    if HAS_EXCLUDE:  # noqa: SIM102 (a constexpr and a tensor)
        if tl.load(exclude + row) >= 0:
            total = num_keys - 1
            lower = lower_of_rest
            upper = upper_of_rest
    below_0 = tl.sum(count_0)
    below_1 = tl.sum(count_1)
    below_2 = tl.sum(count_2)
    below_3 = tl.sum(count_3)
    count = tl.sum(candidates)
    lower_hit = (lower == 0) | ((below_0 <= lower) & (lower < below_1))
    upper_hit = (upper == total) | ((below_2 <= upper) & (upper < below_3))
    hit = lower_hit & upper_hit & (count <= capacity)
    between = tl.maximum(below_2 - below_1, 0)
    upper_rank = tl.where(upper == total, count, upper - below_0 - between)
    tl.store(candidate_ranks + row * 2, (lower - below_0).to(tl.int64))
    tl.store(candidate_ranks + row * 2 + 1, upper_rank.to(tl.int64))
    tl.store(candidate_counts + row, tl.minimum(count, capacity))
    tl.store(missed + row, 1 - hit.to(tl.int32))


# Bytes: the keys once for each block of rows and 8 bytes for each candidate. Operations: 2 N K C and about 50 N K of
# others, most of them the prefix sums. Floor: the operations.
@triton.jit(do_not_specialize=["split_tiles", "capacity"])
def _collect_kernel(
    query,
    keys,
    sample_keys,
    lower_thresholds,
    lower_ties,
    upper_thresholds,
    upper_ties,
    exclude,
    offsets,
    candidate_keys,
    candidate_indices,
    num_rows,
    num_keys,
    num_channels,
    stride_row,
    stride_row_channel,
    stride_key,
    stride_key_channel,
    split_tiles,
    capacity,
    HAS_EXCLUDE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Candidates of a split in ascending key index, to where they belong: nothing that one split has too many of."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    channels = tl.arange(0, CHANNELS)
    row_mask = rows < num_rows
    queries = load_queries(query, rows, channels, num_rows, num_channels, stride_row, stride_row_channel)
    edge_0, tie_0 = load_edge(lower_thresholds, lower_ties, sample_keys, rows, 0, row_mask)
    edge_1, tie_1 = load_edge(lower_thresholds, lower_ties, sample_keys, rows, 1, row_mask)
    edge_2, tie_2 = load_edge(upper_thresholds, upper_ties, sample_keys, rows, 0, row_mask)
    edge_3, tie_3 = load_edge(upper_thresholds, upper_ties, sample_keys, rows, 1, row_mask)
    excluded = load_excluded(exclude, rows, row_mask, HAS_EXCLUDE)
    row_begin = rows.to(tl.int64)[:, None] * capacity
    offset = tl.load(offsets + split.to(tl.int64) * num_rows + rows, mask=row_mask, other=0)
    begin = split * split_tiles * KEYS
    for start in range(begin, tl.minimum(begin + split_tiles * KEYS, num_keys), KEYS):
        columns = start + tl.arange(0, KEYS)
        similarity, _ = tile_similarities(
            queries, keys, columns, channels, num_keys, num_channels, stride_key, stride_key_channel
        )
        key = order_key(similarity)
        index = columns[None, :]
        candidate = below(key, index, edge_1, tie_1) & ~below(key, index, edge_0, tie_0)
        candidate = candidate | (below(key, index, edge_3, tie_3) & ~below(key, index, edge_2, tie_2))
        candidate = candidate & (columns < num_keys)[None, :] & (index != excluded[:, None])
        number = candidate.to(tl.int32)
        place = offset[:, None] + tl.cumsum(number, 1) - 1
        offset += tl.sum(number, 1)
        candidate = candidate & (place < capacity) & row_mask[:, None]
        tl.store(candidate_keys + row_begin + place, key, mask=candidate)
        tl.store(candidate_indices + row_begin + place, index + tl.zeros_like(place), mask=candidate)


# Bytes: the keys once for each block of rows, 2 K C from memory, partial sums 4 S N C. Operations: 4 N K C and about
# 17 N K of others. Floor: the operations.
@triton.jit(do_not_specialize=["split_tiles"])
def _weigh_kernel(
    query,
    keys,
    thresholds,
    ties,
    exclude,
    temperature,
    largest_members,
    sums,
    members,
    weighted_sums,
    num_rows,
    num_keys,
    num_channels,
    stride_row,
    stride_row_channel,
    stride_key,
    stride_key_channel,
    split_tiles,
    HAS_EXCLUDE: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The final pass, as triton_info_nce has it over written similarities, and the number of members."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    channels = tl.arange(0, CHANNELS)
    row_mask = rows < num_rows
    queries = load_queries(query, rows, channels, num_rows, num_channels, stride_row, stride_row_channel)
    lower, lower_tie, upper, upper_tie, excluded = load_ring(thresholds, ties, exclude, rows, row_mask, HAS_EXCLUDE)
    factor = (1.0 / tl.load(temperature).to(tl.float64) * LOG2_E).to(tl.float32)
    largest = tl.full([ROWS], LOWEST_KEY, tl.int32)
    total = tl.zeros([ROWS], tl.float32)
    count = tl.zeros([ROWS], tl.int32)
    weighted = tl.zeros([ROWS, CHANNELS], tl.float32)
    begin = split * split_tiles * KEYS
    for start in range(begin, tl.minimum(begin + split_tiles * KEYS, num_keys), KEYS):
        columns = start + tl.arange(0, KEYS)
        similarity, key_vectors = tile_similarities(
            queries, keys, columns, channels, num_keys, num_channels, stride_key, stride_key_channel
        )
        key = order_key(similarity)
        index = columns[None, :]
        member = below(key, index, upper, upper_tie) & ~below(key, index, lower, lower_tie)
        member = member & (columns < num_keys)[None, :] & (index != excluded)
        count += tl.sum(member.to(tl.int32), 1)
        largest, shift, scale = rescale(key, member, largest, factor)
        weights = tl.where(member, tl.exp2((similarity - shift[:, None]) * factor), 0.0)
        total = total * scale + tl.sum(weights, 1)
        if WITH_GRADIENT:
            weighted = tl.dot(weights.to(key_vectors.dtype), key_vectors, weighted * scale[:, None])
    at = split.to(tl.int64) * num_rows + rows
    tl.store(largest_members + at, largest, mask=row_mask)
    tl.store(sums + at, total, mask=row_mask)
    tl.store(members + at, count, mask=row_mask)
    if WITH_GRADIENT:
        tl.store(
            weighted_sums + at[:, None] * num_channels + channels[None, :],
            weighted,
            mask=row_mask[:, None] & (channels < num_channels)[None, :],
        )
