"""Triton: everything after the first 1x1 in one kernel, for widths that fit on the chip."""

import triton
import triton.language as tl

from iecl_fast.saib.triton_tiles import (
    activate,
    channel_offset,
    load_rows,
    load_weight,
    part,
    position_term,
    positions_of,
    tap_rows,
)


@triton.jit
def _keep(rows, row, inside, start, before, after, SILU: tl.constexpr, SLICE: tl.constexpr, WIDTH: tl.constexpr):
    """A slice of h2 for the backward pass: what comes before SiLU; ReLU's gradient is seen from what comes after."""
    value = (before if SILU else after).to(rows.dtype.element_ty)
    n = start + tl.arange(0, SLICE)
    tl.store(rows + row.to(tl.int64)[:, None] * WIDTH + n[None, :], value, mask=inside[:, None] & (n < WIDTH)[None, :])


@triton.jit
def _store_image(
    target, skip, total, position, row, cells, inside, pixel, target_pixel, start,
    image_n, image_c, image_h, image_w, target_n, target_c, target_h, target_w,
    D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PATCH: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """Channels ``start`` .. ``start`` + BLOCK - 1 of target = total + embedding + 2 skip, 16 at a time."""
    for q in tl.static_range(BLOCK // 16):
        piece = part(total, q, BLOCK // 16)
        n = start + q * 16 + tl.arange(0, 16)
        within = inside[:, None] & (n < D)[None, :]
        if position is not None:
            piece += position_term(position, None, row, cells, inside, n, K, BATCH)
        at = pixel[:, None] + channel_offset(n, image_n, image_c, image_h, image_w, PATCH, BATCH)[None, :]
        piece += 2 * tl.load(skip + at, mask=within, other=0.0).to(tl.float32)
        at = target_pixel[:, None] + channel_offset(n, target_n, target_c, target_h, target_w, PATCH, BATCH)[None, :]
        tl.store(target + at, piece.to(target.dtype.element_ty), mask=within)


# X' = 2 X + E + W4 act(W3 act(W2 * h1)) for BLOCK_M positions at a time, all channels.
#
# The 2D channels of h2 are SLICES (1 or 3) tiles of SLICE; they stay in registers as the operand of W3. h3 is made
# BLOCK_T channels at a time and multiplied by W4 at once, so it never exists as a whole.
#
# Operations: 2 * positions * 24 D^2 (18 the 3x3, 4 W3, 2 W4). Bytes: positions * D * size for each of h1, X and X', and
# twice that for h2 where it is kept for the backward pass. At D = 128 and 16 bits: 786k operations to 768 bytes a
# position, or 1024 to 1280: five and three times what a Hopper chip needs to be bound by arithmetic.
@triton.jit
def tail_kernel(
    source,  # w1's output, rows (.., K)
    w2,  # (9, N, K)
    w3,  # (N, N)
    w4,  # (K, N)
    second,  # rows (.., N): what the backward pass wants of the 3x3; or None
    skip,  # X
    target,
    position,  # see position_term; or None
    count,
    grid_height,
    grid_width,
    extent_a,
    extent_b,
    image_n,
    image_c,
    image_h,
    image_w,
    target_n,
    target_c,
    target_h,
    target_w,
    D: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    SILU: tl.constexpr,
    PATCH: tl.constexpr,
    BATCH: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
):
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    activation: tl.constexpr = "silu" if SILU else "relu"
    load_activation: tl.constexpr = "silu" if SILU else "none"
    dtype: tl.constexpr = source.dtype.element_ty
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < count
    row, a, b, _ = positions_of(m, grid_height, grid_width, image_n, image_c, image_h, image_w, PATCH, BATCH)
    n0 = tl.arange(0, SLICE)
    n1 = SLICE + n0
    n2 = 2 * SLICE + n0

    total0 = tl.zeros([BLOCK_M, SLICE], tl.float32)
    total1 = total0
    total2 = total0
    for step in range(9 * steps):
        tap = step // steps
        k = (step % steps) * BLOCK_K + tl.arange(0, BLOCK_K)
        neighbour, exists = tap_rows(row, a, b, inside, tap, extent_a, extent_b, 1)
        tile = load_rows(source, neighbour, exists, k, 0, K, BLOCK_K, load_activation)
        factor = load_weight(w2, tap, n0, k, N, K, SLICE, BLOCK_K, False)
        total0 = tl.dot(tile, factor, total0, input_precision=PRECISION)
        if SLICES == 3:
            factor = load_weight(w2, tap, n1, k, N, K, SLICE, BLOCK_K, False)
            total1 = tl.dot(tile, factor, total1, input_precision=PRECISION)
            factor = load_weight(w2, tap, n2, k, N, K, SLICE, BLOCK_K, False)
            total2 = tl.dot(tile, factor, total2, input_precision=PRECISION)

    after = activate(total0, activation)
    h0 = after.to(dtype)
    if second is not None:
        _keep(second, row, inside, 0, total0, after, SILU, SLICE, N)
    if SLICES == 3:
        after = activate(total1, activation)
        h1 = after.to(dtype)
        if second is not None:
            _keep(second, row, inside, SLICE, total1, after, SILU, SLICE, N)
        after = activate(total2, activation)
        h2 = after.to(dtype)
        if second is not None:
            _keep(second, row, inside, 2 * SLICE, total2, after, SILU, SLICE, N)

    o0 = tl.arange(0, SLICE // 2)
    o1 = SLICE // 2 + o0
    o2 = SLICE + o0
    out0 = tl.zeros([BLOCK_M, SLICE // 2], tl.float32)
    out1 = out0
    out2 = out0
    for start in range(0, N, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        factor = load_weight(w3, 0, t, n0, N, N, BLOCK_T, SLICE, False)
        z = tl.dot(h0, factor, input_precision=PRECISION)
        if SLICES == 3:
            factor = load_weight(w3, 0, t, n1, N, N, BLOCK_T, SLICE, False)
            z = tl.dot(h1, factor, z, input_precision=PRECISION)
            factor = load_weight(w3, 0, t, n2, N, N, BLOCK_T, SLICE, False)
            z = tl.dot(h2, factor, z, input_precision=PRECISION)
        third = activate(z, activation).to(dtype)
        factor = load_weight(w4, 0, o0, t, K, N, SLICE // 2, BLOCK_T, False)
        out0 = tl.dot(third, factor, out0, input_precision=PRECISION)
        if SLICES == 3:
            factor = load_weight(w4, 0, o1, t, K, N, SLICE // 2, BLOCK_T, False)
            out1 = tl.dot(third, factor, out1, input_precision=PRECISION)
            factor = load_weight(w4, 0, o2, t, K, N, SLICE // 2, BLOCK_T, False)
            out2 = tl.dot(third, factor, out2, input_precision=PRECISION)

    row, a, b, pixel = positions_of(m, grid_height, grid_width, image_n, image_c, image_h, image_w, PATCH, BATCH)
    _, _, _, target_pixel = positions_of(
        m, grid_height, grid_width, target_n, target_c, target_h, target_w, PATCH, BATCH
    )
    cells = extent_a * extent_b
    _store_image(
        target, skip, out0, position, row, cells, inside, pixel, target_pixel, 0,
        image_n, image_c, image_h, image_w, target_n, target_c, target_h, target_w, D, K, SLICE // 2, PATCH, BATCH,
    )  # fmt: skip
    if SLICES == 3:
        _store_image(
            target, skip, out1, position, row, cells, inside, pixel, target_pixel, SLICE // 2,
            image_n, image_c, image_h, image_w, target_n, target_c, target_h, target_w, D, K, SLICE // 2, PATCH, BATCH,
        )  # fmt: skip
        _store_image(
            target, skip, out2, position, row, cells, inside, pixel, target_pixel, SLICE,
            image_n, image_c, image_h, image_w, target_n, target_c, target_h, target_w, D, K, SLICE // 2, PATCH, BATCH,
        )  # fmt: skip
