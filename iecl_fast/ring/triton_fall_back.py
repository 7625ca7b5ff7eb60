"""Triton kernel for the rows that plan B' missed: always launched, and gone at once where none was.

One program does all of plan C for a row, so it is slow, but it takes nothing for granted: not a sample, nor that two
products round alike, nor that keys are finite.
"""

import triton
import triton.language as tl

from iecl_fast.ring.triton_info_nce import LOG2_E, finite_or_zero, rescale
from iecl_fast.ring.triton_order import LOWEST_KEY, NAN_KEY, below, order_key
from iecl_fast.ring.triton_select import nth_boundary


# Bytes: the flags, 4 N, where none is raised: the floor. Else for each such row the keys twice and its similarities
# seven times. Operations: 4 K C for each such row.
@triton.jit(do_not_specialize=["lower", "upper", "lower_of_rest", "upper_of_rest", "splits"])
def _fall_back_kernel(
    query,
    keys,
    exclude,
    temperature,
    missed,
    scratch,
    largest_members,
    sums,
    weighted_sums,
    num_rows,
    num_keys,
    num_channels,
    splits,
    stride_row,
    stride_row_channel,
    stride_key,
    stride_key_channel,
    lower,
    upper,
    lower_of_rest,
    upper_of_rest,
    HAS_EXCLUDE: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    KEYS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All of plan C for the rows that ``missed`` names, one after another; their sums go to the first split."""
    channels = tl.arange(0, CHANNELS)
    channel_mask = channels < num_channels
    factor = (1.0 / tl.load(temperature).to(tl.float64) * LOG2_E).to(tl.float32)
    similarities = scratch + tl.program_id(0).to(tl.int64) * num_keys
    for number in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        if tl.load(missed + number) != 0:
            row = tl.zeros([], tl.int64) + number
            own_at = query + row * stride_row + channels.to(tl.int64) * stride_row_channel
            own = tl.load(own_at, mask=channel_mask, other=0.0).to(tl.float32)
            for start in range(0, num_keys, KEYS):
                columns = start + tl.arange(0, KEYS)
                at = columns.to(tl.int64)[:, None] * stride_key + channels.to(tl.int64)[None, :] * stride_key_channel
                mask = (columns < num_keys)[:, None] & channel_mask[None, :]
                vectors = tl.load(keys + at, mask=mask, other=0.0).to(tl.float32)
                tl.store(similarities + columns, tl.sum(own[None, :] * vectors, 1), mask=columns < num_keys)
            tl.debug_barrier()  # other threads of the program read them

            excluded = -1
            rank = lower
            other_rank = upper
            count = num_keys
            if HAS_EXCLUDE:
                excluded = tl.load(exclude + row).to(tl.int32)
                if excluded >= 0:
                    rank = lower_of_rest
                    other_rank = upper_of_rest
                    count = num_keys - 1
            stride = tl.full([], 1, tl.int64)
            threshold, tie, upper_threshold, upper_tie = nth_boundary(
                similarities,
                stride,
                similarities,
                similarities,
                1,
                num_keys,
                excluded,
                rank,
                other_rank,
                True,
                BLOCK,
            )
            # Below the first key of all lies nothing, but none has the rank of the end.
            upper_threshold = tl.where(other_rank == count, NAN_KEY, upper_threshold)
            upper_tie = tl.where(other_rank == count, num_keys, upper_tie)

            largest = tl.full([1], LOWEST_KEY, tl.int32)
            total = tl.zeros([1], tl.float32)
            weighted = tl.zeros([CHANNELS], tl.float32)
            for start in range(0, num_keys, KEYS):
                columns = start + tl.arange(0, KEYS)
                similarity = tl.load(similarities + columns, mask=columns < num_keys, other=0.0)
                key = order_key(similarity)
                member = below(key, columns, upper_threshold, upper_tie) & ~below(key, columns, threshold, tie)
                member = member & (columns < num_keys) & (columns != excluded)
                largest, shift, scale = rescale(key[None, :], member[None, :], largest, factor)
                weights = tl.where(member, tl.exp2((similarity - shift) * factor), 0.0)
                total = total * scale + tl.sum(weights[None, :], 1)
                if WITH_GRADIENT:
                    at = columns.to(tl.int64)[:, None] * stride_key
                    at += channels.to(tl.int64)[None, :] * stride_key_channel
                    mask = (columns < num_keys)[:, None] & channel_mask[None, :]
                    vectors = tl.load(keys + at, mask=mask, other=0.0).to(tl.float32)
                    weighted = weighted * scale + tl.sum(weights[:, None] * finite_or_zero(vectors), 0)
            one = tl.arange(0, 1)
            tl.store(largest_members + row + one, largest)
            tl.store(sums + row + one, total)
            if WITH_GRADIENT:
                tl.store(weighted_sums + row * num_channels + channels, weighted, mask=channel_mask)
            part = row
            for _ in range(1, splits):
                part += num_rows
                tl.store(largest_members + part, LOWEST_KEY)
                tl.store(sums + part, 0.0)
            tl.debug_barrier()  # before the next row overwrites the similarities
