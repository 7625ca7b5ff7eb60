"""Selection and compaction in Triton: for CUDA tensors where the CUDA library was not built.

Same schemas and same results as ``_ring_select``, ``_ring_select_candidates``, ``_ring_compact`` and ``_ring_draw`` of
csrc/library_cuda.cu. One program for one row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from iecl_fast.ring.triton_order import LOWEST_KEY, NAN_KEY, below, load_boundary, order_key

BLOCK = 4096  # keys that a program looks at in one step


@triton.jit
def _load_keys(source, offset, mask, FROM_SIMILARITIES: tl.constexpr):
    value = tl.load(source + offset, mask=mask, other=0)
    return order_key(value) if FROM_SIMILARITIES else value


@triton.jit
def nth_boundary(
    source,
    stride,
    indices,
    counts,
    segments,
    capacity,
    excluded,
    rank,
    other_rank,
    FROM_SIMILARITIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(threshold, tie) of two ranks among a row's keys, each as the pair of the key with that rank.

    The keys come in segments of ``capacity`` elements of which ``counts`` are there (or ``capacity``, if they are
    similarities); ``excluded`` is the index of one that is passed over. Digits of 8 bits are fixed one after another,
    from the top, by histograms of the keys that agree with those before. Integers alone, in a fixed order.
    """
    bins = tl.arange(0, 256)
    prefix = 0
    other_prefix = 0
    for level in tl.static_range(4):
        histogram = tl.zeros([256], tl.int32)
        other_histogram = tl.zeros([256], tl.int32)
        begin = tl.zeros([], tl.int64)
        for segment in range(segments):
            count = capacity if FROM_SIMILARITIES else tl.load(counts + segment)
            for start in range(0, count, BLOCK):
                element = start + tl.arange(0, BLOCK)
                mask = element < count
                offset = begin + element
                key = _load_keys(source, offset * stride, mask, FROM_SIMILARITIES)
                # Unsigned digits: the sign bit counts the other way round.
                digits = (key ^ LOWEST_KEY).to(tl.uint32, bitcast=True)
                digit = ((digits >> (24 - 8 * level)) & 255).to(tl.int32)
                mask = mask & (element != excluded)
                if level == 0:
                    histogram += tl.histogram(digit, 256, mask)
                else:
                    fixed = (digits >> (32 - 8 * level)).to(tl.int32, bitcast=True)
                    histogram += tl.histogram(digit, 256, mask & (fixed == prefix))
                    other_histogram += tl.histogram(digit, 256, mask & (fixed == other_prefix))
            begin += capacity
        if level == 0:
            other_histogram = histogram
        upto = tl.cumsum(histogram, 0)
        found = (upto - histogram <= rank) & (rank < upto)
        prefix = (prefix << 8) | tl.sum(tl.where(found, bins, 0))
        rank -= tl.sum(tl.where(found, upto - histogram, 0))
        upto = tl.cumsum(other_histogram, 0)
        found = (upto - other_histogram <= other_rank) & (other_rank < upto)
        other_prefix = (other_prefix << 8) | tl.sum(tl.where(found, bins, 0))
        other_rank -= tl.sum(tl.where(found, upto - other_histogram, 0))
    threshold = prefix ^ LOWEST_KEY
    other_threshold = other_prefix ^ LOWEST_KEY

    # Among the keys equal to a threshold the tie goes by position.
    tie = 0
    other_tie = 0
    begin = tl.zeros([], tl.int64)
    for segment in range(segments):
        count = capacity if FROM_SIMILARITIES else tl.load(counts + segment)
        for start in range(0, count, BLOCK):
            element = start + tl.arange(0, BLOCK)
            mask = element < count
            offset = begin + element
            key = _load_keys(source, offset * stride, mask, FROM_SIMILARITIES)
            mask = mask & (element != excluded)
            index = element
            if not FROM_SIMILARITIES:
                index = tl.load(indices + offset, mask=mask, other=0)
            equal = (mask & (key == threshold)).to(tl.int32)
            here = tl.sum(equal)
            if (rank >= 0) & (rank < here):
                hit = (equal != 0) & (tl.cumsum(equal, 0) == rank + 1)
                tie = tl.sum(tl.where(hit, index, 0))
            rank -= here
            equal = (mask & (key == other_threshold)).to(tl.int32)
            here = tl.sum(equal)
            if (other_rank >= 0) & (other_rank < here):
                hit = (equal != 0) & (tl.cumsum(equal, 0) == other_rank + 1)
                other_tie = tl.sum(tl.where(hit, index, 0))
            other_rank -= here
        begin += capacity
    return threshold, tie, other_threshold, other_tie


@triton.jit
def store_boundary(thresholds, ties, at, rank, total, last, threshold, tie):
    """Stores the boundary of ``rank``: ends of the order have no key of their own."""
    nothing = rank == 0
    everything = rank == total
    threshold = tl.where(everything, NAN_KEY, tl.where(nothing, LOWEST_KEY, threshold))
    tie = tl.where(everything, last, tl.where(nothing, 0, tie).to(tl.int64))
    tl.store(thresholds + at, threshold)
    tl.store(ties + at, tie)


# Bytes: a row five times, 20 K, of which those after the first come from the cache for rows of less than a megabyte.
# Operations: about 10 K integer ones a pass. Floor: one reading of the similarities, 4 N K bytes.
@triton.jit(do_not_specialize=["lower", "upper", "lower_of_rest", "upper_of_rest"])  # a schedule changes them
def _select_kernel(
    similarities,
    thresholds,
    ties,
    exclude,
    num_keys,
    stride_row,
    stride_key,
    lower,
    upper,
    lower_of_rest,
    upper_of_rest,
    HAS_EXCLUDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    excluded = -1
    if HAS_EXCLUDE:
        excluded = tl.load(exclude + row).to(tl.int32)
    rank = lower
    other_rank = upper
    total = num_keys
    if excluded >= 0:
        rank = lower_of_rest
        other_rank = upper_of_rest
        total = num_keys - 1
    source = similarities + row * stride_row
    stride = tl.full([], stride_key, tl.int64)
    threshold, tie, other_threshold, other_tie = nth_boundary(
        source, stride, source, source, 1, num_keys, excluded, rank, other_rank, True, BLOCK
    )
    last = tl.full([], num_keys, tl.int64)
    store_boundary(thresholds, ties, row * 2, rank, total, last, threshold, tie)
    store_boundary(thresholds, ties, row * 2 + 1, other_rank, total, last, other_threshold, other_tie)


def select(similarities: Tensor, ranks: list[int], exclude: Tensor | None) -> tuple[Tensor, Tensor]:
    """Boundaries of two ranks in each row.

    Args:
        similarities: (n, K) float32, any strides.
        ranks: lower and upper, then lower and upper for the rows that exclude a key.
        exclude: (n,) int64 in one piece, -1 for none, or None.

    Returns:
        thresholds (n, 2) int32 and ties (n, 2) int64, see triton_order.
    """
    rows, num_keys = similarities.shape
    thresholds = similarities.new_empty((rows, 2), dtype=torch.int32)
    ties = similarities.new_empty((rows, 2), dtype=torch.int64)
    if rows > 0:
        _select_kernel[(rows,)](
            similarities,
            thresholds,
            ties,
            exclude,
            num_keys,
            *similarities.stride(),
            *ranks,
            HAS_EXCLUDE=exclude is not None,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return thresholds, ties


def whole_order(like: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """The boundaries between which all keys lie, for the rows of ``like``; as :func:`select` returns them."""
    thresholds = like.new_full((len(like), 2), 2**31 - 1, dtype=torch.int32)
    ties = like.new_full((len(like), 2), num_keys, dtype=torch.int64)
    thresholds[:, 0] = -(2**31)
    ties[:, 0] = 0
    return thresholds, ties


# Bytes: the candidates' keys five times and their indices once. Operations: about 10 integer ones for each key in each
# pass. Floor: the keys once, 4 bytes each.
@triton.jit(do_not_specialize=["segments", "capacity"])
def _select_candidates_kernel(keys, indices, counts, ranks, thresholds, ties, segments, capacity, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    rank = tl.load(ranks + row * 2).to(tl.int32)
    other_rank = tl.load(ranks + row * 2 + 1).to(tl.int32)
    counts += row * segments
    total = 0
    for segment in range(segments):
        total += tl.load(counts + segment)
    begin = row * segments * capacity
    threshold, tie, other_threshold, other_tie = nth_boundary(
        keys + begin, 1, indices + begin, counts, segments, capacity, -1, rank, other_rank, False, BLOCK
    )
    last = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    at_end = rank == total
    tl.store(thresholds + row * 2, tl.where(at_end, NAN_KEY, threshold))
    tl.store(ties + row * 2, tl.where(at_end, last, tie))
    at_end = other_rank == total
    tl.store(thresholds + row * 2 + 1, tl.where(at_end, NAN_KEY, other_threshold))
    tl.store(ties + row * 2 + 1, tl.where(at_end, last, other_tie))


def select_candidates(keys: Tensor, indices: Tensor, counts: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """Boundaries of two ranks among each row's candidates.

    Args:
        keys, indices: (n, S, capacity) int32, order keys and key indices, these ascending from segment to segment.
        counts: (n, S) int32, how many of each segment are there.
        ranks: (n, 2) int64. A rank outside 0..count gives any boundary.

    Returns:
        thresholds (n, 2) int32 and ties (n, 2) int64, see triton_order.
    """
    rows, segments, capacity = keys.shape
    thresholds = keys.new_empty((rows, 2))
    ties = keys.new_empty((rows, 2), dtype=torch.int64)
    if rows > 0:
        _select_candidates_kernel[(rows,)](
            keys, indices, counts, ranks, thresholds, ties, segments, capacity, BLOCK=BLOCK, num_warps=8
        )
    return thresholds, ties


# Bytes: the similarities once, 4 N K, and N M members with 4 or 12 bytes each: the floor. Operations: about 20 integer
# ones for each similarity, half of them the prefix sum.
@triton.jit(do_not_specialize=["size"])
def _compact_kernel(
    similarities,
    thresholds,
    ties,
    exclude,
    values,
    positions,
    num_keys,
    size,
    stride_row,
    stride_key,
    HAS_EXCLUDE: tl.constexpr,
    WITH_INDICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    excluded = -1
    if HAS_EXCLUDE:
        excluded = tl.load(exclude + row).to(tl.int32)
    threshold, tie = load_boundary(thresholds, ties, row * 2, True)
    upper_threshold, upper_tie = load_boundary(thresholds, ties, row * 2 + 1, True)
    stride = tl.full([], stride_key, tl.int64)
    similarities += row * stride_row
    kept = 0
    for start in range(0, num_keys, BLOCK):
        index = start + tl.arange(0, BLOCK)
        mask = index < num_keys
        similarity = tl.load(similarities + index * stride, mask=mask, other=0.0)
        key = order_key(similarity)
        member = below(key, index, upper_threshold, upper_tie) & ~below(key, index, threshold, tie)
        member = member & mask & (index != excluded)
        place = kept + tl.cumsum(member.to(tl.int32), 0) - 1
        kept += tl.sum(member.to(tl.int32))
        member = member & (place < size)
        tl.store(values + row * size + place, similarity, mask=member)
        if WITH_INDICES:
            tl.store(positions + row * size + place, index.to(tl.int64), mask=member)


def compact(
    similarities: Tensor, thresholds: Tensor, ties: Tensor, exclude: Tensor | None, size: int, with_indices: bool
) -> tuple[Tensor, Tensor]:
    """The members of each row's ring in ascending key index: similarities float32 and indices int64, (n, size) each.

    Without ``with_indices`` the latter are (0, size). Arguments as for :func:`select`, which gives the boundaries; what
    lies behind the members of a row that has fewer is not written.
    """
    rows, num_keys = similarities.shape
    values = similarities.new_empty((rows, size))
    positions = similarities.new_empty((rows if with_indices else 0, size), dtype=torch.int64)
    if rows > 0:
        _compact_kernel[(rows,)](
            similarities,
            thresholds,
            ties,
            exclude,
            values,
            positions,
            num_keys,
            size,
            *similarities.stride(),
            HAS_EXCLUDE=exclude is not None,
            WITH_INDICES=with_indices,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return values, positions


def draw(
    similarities: Tensor,
    thresholds: Tensor,
    ties: Tensor,
    exclude: Tensor | None,
    uniform: Tensor,
    ranks: list[int],
    with_indices: bool,
) -> tuple[Tensor, Tensor]:
    """Members at the positions ``floor(uniform * M)`` of each row's ring in ascending key index.

    Args:
        uniform: (n, num_samples) float64 in [0, 1). The others as for :func:`select` and :func:`compact`.

    Returns:
        similarities (n, num_samples) float32 and indices int64 of that shape, or (0, num_samples).
    """
    size, size_of_rest = ranks[1] - ranks[0], ranks[3] - ranks[2]
    members, positions = compact(similarities, thresholds, ties, exclude, max(size, size_of_rest), with_indices)
    if exclude is None:
        place = (uniform * size).long().clamp(max=size - 1)
    else:
        sizes = torch.where(exclude[:, None] >= 0, size_of_rest, size)
        place = torch.minimum((uniform * sizes).long(), sizes - 1)
    drawn = positions.gather(1, place) if with_indices else positions.new_empty((0, uniform.shape[1]))
    return members.gather(1, place), drawn
