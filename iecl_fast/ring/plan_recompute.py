"""Plan B': nothing of the size N x K; the similarities are formed anew by each pass over the keys.

A hashed sample of the keys brackets both boundaries of each row, the brackets' edges being pairs of an order key and a
key index as the boundaries are, so that many equal similarities make no bracket wider. One pass counts the keys below
the edges, one collects the few between them, from which the exact boundaries are selected, and one weighs the members.
A row where a bracket missed, or anything else is not as it should be, is done again by a kernel that is always launched
and leaves at once where nothing was missed. See triton_recompute for why the passes agree.
"""

import math

import torch
import triton
from torch import Tensor

from iecl_fast.ring import tiles, triton_fall_back, triton_recompute, triton_select
from iecl_fast.ring.triton_combine import Check, Parts, combine

# A bracket misses with a probability of less than 2 exp(-MISS / 2), about 5e-7 (Bernstein's inequality).
MISS = 30.25
# Rows that are done again at a time, in a row of similarities each.
FALL_BACKS = 32
FALL_BACK_BYTES = 32 * 2**20


def sample_size(num_keys: int) -> int:
    """Keys in the sample; the candidates grow with K / sqrt(m), the sample's similarities with m."""
    return min(num_keys, 8192 if num_keys < 2**18 else 32768)


def bracket(rank: int, num_keys: int, size: int) -> tuple[int, int]:
    """Ranks in a sample of ``size`` that bracket a rank among all keys; the ends of the order are known without one."""
    if rank in (0, num_keys):
        return (0, 0) if rank == 0 else (size, size)
    share = rank / num_keys
    variance = size * share * (1 - share)
    reach = MISS / 6 + math.sqrt((MISS / 6) ** 2 + MISS * variance) + 1
    return max(0, math.floor(size * share - reach)), min(size, math.ceil(size * share + reach))


def candidate_capacity(brackets: tuple[tuple[int, int], ...], num_keys: int, size: int) -> int:
    """Keys that lie in the brackets, but for a probability of about exp(-MISS / 2)."""
    width = sum(end - first for first, end in brackets)
    most = (width + MISS / 6 + math.sqrt((MISS / 6) ** 2 + MISS * width)) * num_keys / size
    return min(num_keys, math.ceil(most / 16) * 16)


def bytes_of_row(num_keys: int, channels: int) -> int:
    """Memory that a row takes, at the most, for any ring."""
    size = sample_size(num_keys)
    edges = bracket(num_keys // 2, num_keys, size)
    tile = tiles.recompute(channels)
    splits = -(-num_keys // (tiles.split_tiles(1, num_keys, tile) * tile.keys))
    return 4 * size + 8 * candidate_capacity((edges, edges), num_keys, size) + splits * (4 * channels + 28)


def info_nce(
    query: Tensor,
    positive_key: Tensor,
    keys: Tensor,
    temperature: Tensor,
    ranks: list[int],
    exclude: Tensor | None,
    select,
    select_candidates,
    loss: Tensor,
    log_denominator: Tensor,
    query_gradient: Tensor,
) -> None:
    """Writes loss (n,) float32, log_denominator (n,) float64 and, unless it is empty, query_gradient (n, C) float32."""
    (rows, channels), num_keys = query.shape, keys.shape[0]
    with_gradient = len(query_gradient) > 0
    tile = tiles.recompute(channels)
    split_tiles = tiles.split_tiles(rows, num_keys, tile)
    splits = triton.cdiv(num_keys, split_tiles * tile.keys)
    row_blocks = triton.cdiv(rows, tile.rows)
    # All that the kernels with a product share, so that each forms the same product.
    operands = (rows, num_keys, channels, *query.stride(), *keys.stride())
    shape = {
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "CHANNELS": tile.channels,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    has_exclude = exclude is not None
    plain = ranks[:2] == [0, num_keys]

    if plain:
        thresholds, ties = triton_select.whole_order(query, num_keys)
        missed = query.new_zeros(rows, dtype=torch.int32)
    else:
        size = sample_size(num_keys)
        # Those of rows without an excluded key are the same or one more, which a bracket covers.
        lower, upper, candidate_keys = (*ranks[2:], num_keys - 1) if has_exclude else (*ranks[:2], num_keys)
        brackets = tuple(bracket(rank, candidate_keys, size) for rank in (lower, upper))
        sample_keys = query.new_empty(size + 1, dtype=torch.int32)
        triton_recompute._sample_keys_kernel[(triton.cdiv(size + 1, 1024),)](sample_keys, num_keys, size, BLOCK=1024)
        sample = query.new_empty((rows, size), dtype=torch.float32)
        triton_recompute._sample_kernel[(row_blocks, triton.cdiv(size, tile.keys))](
            query, keys, sample_keys, sample, *operands[:3], size, *operands[3:], **shape
        )
        edges = (sample_keys, *(part for ends in brackets for part in select(sample, [*ends, 0, 0], None)))
        counts = query.new_empty((splits, rows, 4), dtype=torch.int32)
        triton_recompute._count_kernel[(row_blocks, splits)](
            query,
            keys,
            *edges,
            exclude,
            counts,
            *operands,
            split_tiles,
            HAS_EXCLUDE=has_exclude,
            **shape,
        )
        capacity = candidate_capacity(brackets, num_keys, size)
        offsets = query.new_empty((splits, rows), dtype=torch.int32)
        candidate_ranks = query.new_empty((rows, 2), dtype=torch.int64)
        candidate_counts = query.new_empty((rows, 1), dtype=torch.int32)
        missed = query.new_empty(rows, dtype=torch.int32)
        triton_recompute._place_kernel[(rows,)](
            counts,
            exclude,
            offsets,
            candidate_ranks,
            candidate_counts,
            missed,
            rows,
            num_keys,
            splits,
            capacity,
            *ranks,
            HAS_EXCLUDE=has_exclude,
            SPLITS=triton.next_power_of_2(splits),
        )
        candidates = query.new_empty((2, rows, 1, capacity), dtype=torch.int32)
        triton_recompute._collect_kernel[(row_blocks, splits)](
            query,
            keys,
            *edges,
            exclude,
            offsets,
            *candidates,
            *operands,
            split_tiles,
            capacity,
            HAS_EXCLUDE=has_exclude,
            **shape,
        )
        thresholds, ties = select_candidates(*candidates, candidate_counts, candidate_ranks)
        if lower == 0:  # below which there is no candidate to name
            thresholds[:, 0] = -(2**31)
            ties[:, 0] = 0

    parts = Parts.empty(query, splits, rows, channels, with_gradient)
    members = query.new_empty((splits, rows), dtype=torch.int32)
    triton_recompute._weigh_kernel[(row_blocks, splits)](
        query,
        keys,
        thresholds,
        ties,
        exclude,
        temperature,
        parts.largest_members,
        parts.sums,
        members,
        parts.weighted_sums,
        *operands,
        split_tiles,
        HAS_EXCLUDE=has_exclude,
        WITH_GRADIENT=with_gradient,
        **shape,
    )
    outputs = (query, positive_key, temperature, loss, log_denominator, query_gradient)
    check = Check(missed, members, exclude, ranks[1] - ranks[0], ranks[3] - ranks[2])
    combine(parts, *outputs, check)

    programs = max(1, min(rows, FALL_BACKS, FALL_BACK_BYTES // (4 * num_keys)))
    scratch = query.new_empty((programs, num_keys), dtype=torch.float32)
    triton_fall_back._fall_back_kernel[(programs,)](
        query,
        keys,
        exclude,
        temperature,
        missed,
        scratch,
        *parts,
        *operands[:3],
        splits,
        *operands[3:],
        *ranks,
        HAS_EXCLUDE=has_exclude,
        WITH_GRADIENT=with_gradient,
        KEYS=16,
        CHANNELS=tile.channels,
        BLOCK=512,
        num_warps=8,
        num_stages=1,
        maxnreg=128,  # left to itself, ptxas spills for the sake of occupancy
    )
    combine(parts, *outputs, check._replace(members=None))
