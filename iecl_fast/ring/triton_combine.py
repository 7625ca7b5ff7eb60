"""Triton kernel that ends InfoNCE: the parts of each row are added up, in their order, and its positive comes in."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from iecl_fast.ring.triton_order import LOWEST_KEY, similarity_of


@triton.jit
def log1p(x):
    """log(1 + x) in float64, also of small x (Higham, "Accuracy and Stability of Numerical Algorithms", 1.14.1)."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * x / tl.where(y == 1.0, 1.0, y - 1.0))


# Bytes: the partial sums once, 4 S N C; their floor. Operations: 2 S N C, in float64.
@triton.jit(do_not_specialize=["splits", "size", "size_of_rest"])
def _combine_kernel(
    query,
    positive_key,
    temperature,
    largest_members,
    sums,
    weighted_sums,
    loss,
    log_denominator,
    query_gradient,
    members,
    exclude,
    missed,
    num_rows,
    num_channels,
    splits,
    size,
    size_of_rest,
    stride_query,
    stride_query_channel,
    stride_positive,
    stride_positive_channel,
    HAS_EXCLUDE: tl.constexpr,
    CHECK: tl.constexpr,
    ONLY_MISSED: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    SPLITS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Adds up a row's parts, in their order, and brings in its positive key.

    CHECK: raises ``missed`` for a row that is not to be trusted. ONLY_MISSED: for rows where it is raised alone.
    """
    row = tl.program_id(0).to(tl.int64)
    if ONLY_MISSED:  # noqa: SIM102 (a constexpr and a tensor)
        if tl.load(missed + row) == 0:
            return
    scale = 1.0 / tl.load(temperature).to(tl.float64)
    query += row * stride_query
    positive_key += row * stride_positive
    products = tl.zeros([CHANNELS], tl.float64)
    for first in range(0, num_channels, CHANNELS):
        channels = (first + tl.arange(0, CHANNELS)).to(tl.int64)
        mask = channels < num_channels
        a = tl.load(query + channels * stride_query_channel, mask=mask, other=0.0).to(tl.float64)
        products += a * tl.load(positive_key + channels * stride_positive_channel, mask=mask, other=0.0).to(tl.float64)
    positive = tl.sum(products)

    split = tl.arange(0, SPLITS).to(tl.int64)
    at = split * num_rows + row
    largest = tl.load(largest_members + at, mask=split < splits, other=LOWEST_KEY)
    parts = tl.load(sums + at, mask=split < splits, other=0.0).to(tl.float64)
    shift = similarity_of(tl.max(largest)).to(tl.float64)  # the largest member, NaN above all
    # Relative to the larger of the two: ring and own are the exponentials of the ring and of the positive.
    reference = tl.where((positive > shift) | (positive != positive), positive, shift)
    part_scale = tl.exp((similarity_of(largest).to(tl.float64) - reference) * scale)
    ring = tl.sum(tl.where(parts == 0.0, 0.0, parts * part_scale))
    own = tl.exp((positive - reference) * scale)
    value = (reference - positive) * scale + tl.where(positive >= shift, log1p(ring), tl.log(ring + own))
    value = tl.where((shift == float("inf")) & (positive < float("inf")), shift, value)
    tl.store(loss + row, value.to(tl.float32))
    tl.store(log_denominator + row, value + positive * scale)
    faults = 0
    if CHECK:
        wanted = size
        if HAS_EXCLUDE:
            wanted = tl.where(tl.load(exclude + row) >= 0, size_of_rest, size)
        faults += (tl.sum(tl.load(members + at, mask=split < splits, other=0)) != wanted).to(tl.int32)
    if WITH_GRADIENT:
        for first in range(0, num_channels, CHANNELS):
            channels = (first + tl.arange(0, CHANNELS)).to(tl.int64)
            mask = channels < num_channels
            weighted = tl.zeros([CHANNELS], tl.float64)
            part_at = row
            for _ in range(splits):
                part = tl.load(sums + part_at)
                part_shift = similarity_of(tl.load(largest_members + part_at)).to(tl.float64)
                part_sum = tl.load(weighted_sums + part_at * num_channels + channels, mask=mask, other=0.0)
                part_factor = tl.exp((part_shift - reference) * scale)
                weighted += tl.where(part == 0.0, 0.0, part_sum.to(tl.float64) * part_factor)
                part_at += num_rows
            key = tl.load(positive_key + channels * stride_positive_channel, mask=mask, other=0.0).to(tl.float64)
            # The softmax weight of the positive less one is -ring / (ring + own), where the difference would cancel.
            gradient = (weighted - ring * key) / (ring + own) * scale
            tl.store(query_gradient + row * num_channels + channels, gradient.to(tl.float32), mask=mask)
            if CHECK:
                # A key that is no member, but not finite, makes 0 * inf of a sum that ought to be finite.
                spoiled = tl.sum((mask & ~(tl.abs(gradient) < float("inf"))).to(tl.int32))
                faults += tl.where(tl.abs(value) < float("inf"), spoiled, 0)
    if CHECK:
        tl.store(missed + row, tl.load(missed + row) | faults)


class Parts(NamedTuple):
    """Sums over a split's members, relative to the exponential of the largest of them."""

    largest_members: Tensor  # (splits, n) int32, order keys
    sums: Tensor  # (splits, n) float32
    weighted_sums: Tensor  # (splits, n, C) float32, or empty without a gradient

    @staticmethod
    def empty(like: Tensor, splits: int, rows: int, channels: int, with_gradient: bool) -> "Parts":
        return Parts(
            like.new_empty((splits, rows), dtype=torch.int32),
            like.new_empty((splits, rows), dtype=torch.float32),
            like.new_empty((splits, rows, channels) if with_gradient else 0, dtype=torch.float32),
        )


class Check(NamedTuple):
    """What tells whether the parts of a row are to be trusted."""

    missed: Tensor  # (n,) int32, raised where not
    members: Tensor | None  # (splits, n) int32, what the parts are made of, or None to combine the missed rows alone
    exclude: Tensor | None
    size: int  # of the ring
    size_of_rest: int  # of rows that exclude a key


NO_CHECK = Check(None, None, None, 0, 0)


def combine(
    parts: Parts,
    query: Tensor,
    positive_key: Tensor,
    temperature: Tensor,
    loss: Tensor,
    log_denominator: Tensor,
    query_gradient: Tensor,
    check: Check = NO_CHECK,
) -> None:
    """Writes loss (n,) float32, log_denominator (n,) float64 and, unless it is empty, query_gradient (n, C) float32.

    query and positive_key (n, C), any strides; temperature: one floating-point element on the device. With a check it
    also raises ``check.missed``, or combines only the rows where that is raised.
    """
    rows, channels = query.shape
    splits = len(parts.sums)
    _combine_kernel[(rows,)](
        query,
        positive_key,
        temperature,
        *parts,
        loss,
        log_denominator,
        query_gradient,
        check.members,
        check.exclude,
        check.missed,
        rows,
        channels,
        splits,
        check.size,
        check.size_of_rest,
        *query.stride(),
        *positive_key.stride(),
        HAS_EXCLUDE=check.exclude is not None,
        CHECK=check.members is not None,
        ONLY_MISSED=check.missed is not None and check.members is None,
        WITH_GRADIENT=len(query_gradient) > 0,
        SPLITS=triton.next_power_of_2(splits),
        CHANNELS=triton.next_power_of_2(min(max(channels, 1), 1024)),
        num_warps=4,
    )
