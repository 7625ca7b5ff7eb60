"""Triton: one kernel for every product of SAIB over positions, forward and backward."""

import triton
import triton.language as tl

from iecl_fast.saib.triton_tiles import (
    activate,
    activation_gradient,
    channel_offset,
    load_rows,
    load_weight,
    part,
    places_of,
    position_term,
    positions_of,
    tap_rows,
)


# target[m, n] = epilogue(sum over taps and k of source[m + tap, k] * weight[tap][n, k]), m a position, n a channel.
#
# Operations: 2 * positions * taps * K * N. Bytes: positions * (K + N) * size, and once more N for what the epilogue
# reads; weights stay in the second-level cache. Floor: in 16 bits a Hopper chip does 200 to 300 operations in the time
# of a byte. At D = 256 the 3x3 has 1536 and is bound by arithmetic, the 1x1 products have 85 to 256 and are bound by
# memory. bench/saib/roofline.py has the table.
@triton.jit(do_not_specialize=["source_row", "target_row", "saved_row"])
def product_kernel(
    source,  # rows (.., K), or an image
    weight,  # (TAPS, N, K), TRANSPOSED: (TAPS, K, N)
    target,  # rows (.., N), or an image
    saved,  # rows (.., N) that decide the activation's gradient
    skip,  # image that is added twice
    position,  # see position_term; or None
    columns,
    sums,  # float32 (tiles of n, all positions): sum over channels of product + skip; or None
    first,  # positions first .. first + count - 1, in image order
    count,
    source_row,  # rows of source, target and saved start at this one
    target_row,
    saved_row,
    num_positions,
    grid_height,
    grid_width,
    extent_a,
    extent_b,
    image_n,  # strides of the image source or skip
    image_c,
    image_h,
    image_w,
    target_n,
    target_c,
    target_h,
    target_w,
    D: tl.constexpr,  # channels of the images
    K: tl.constexpr,
    N: tl.constexpr,
    TAPS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SOURCE_IMAGE: tl.constexpr,
    EPILOGUE: tl.constexpr,  # "none", "relu", "relu_gradient", "silu_gradient", "skip"
    LOAD_ACTIVATION: tl.constexpr,  # of source rows
    PATCH: tl.constexpr,
    BATCH: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    LONG: tl.constexpr = EPILOGUE == "skip" or EPILOGUE == "silu_gradient"
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    sign: tl.constexpr = -1 if TRANSPOSED else 1
    tile_n = tl.program_id(0) % tiles_n  # tiles that read the same rows follow each other
    local = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = local < count
    if SOURCE_IMAGE or EPILOGUE == "skip":
        row, a, b, pixel = positions_of(
            first + local, grid_height, grid_width, image_n, image_c, image_h, image_w, PATCH, BATCH
        )
    else:
        row = first + local
        a, b = places_of(row, extent_a, extent_b)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(TAPS * steps):
        tap = step // steps
        k = (step % steps) * BLOCK_K + tl.arange(0, BLOCK_K)
        if SOURCE_IMAGE:
            at = pixel[:, None] + channel_offset(k, image_n, image_c, image_h, image_w, PATCH, BATCH)[None, :]
            tile = tl.load(source + at, mask=inside[:, None] & (k < D)[None, :], other=0.0)
        elif TAPS == 1:
            tile = load_rows(source, row, inside, k, source_row, K, BLOCK_K, LOAD_ACTIVATION)
        else:
            neighbour, exists = tap_rows(row, a, b, inside, tap, extent_a, extent_b, sign)
            tile = load_rows(source, neighbour, exists, k, source_row, K, BLOCK_K, LOAD_ACTIVATION)
        factor = load_weight(weight, tap, n, k, N, K, BLOCK_N, BLOCK_K, TRANSPOSED)
        total = tl.dot(tile, factor, total, input_precision=PRECISION)

    # Epilogues that read take a few columns at a time: with all of them the registers do not suffice.
    PARTS: tl.constexpr = BLOCK_N // 16 if LONG else (BLOCK_N + 63) // 64 if EPILOGUE == "relu_gradient" else 1
    WIDTH: tl.constexpr = BLOCK_N // PARTS
    if EPILOGUE == "skip":
        over_channels = tl.zeros([BLOCK_M], tl.float32)
        _, _, _, target_pixel = positions_of(
            first + local, grid_height, grid_width, target_n, target_c, target_h, target_w, PATCH, BATCH
        )
    for q in tl.static_range(PARTS):
        piece = part(total, q, PARTS)
        c = tile_n * BLOCK_N + q * WIDTH + tl.arange(0, WIDTH)
        if position is not None:
            piece += position_term(position, columns, row, extent_a * extent_b, inside, c, N, BATCH)
        if EPILOGUE == "skip":
            within = inside[:, None] & (c < D)[None, :]
            at = pixel[:, None] + channel_offset(c, image_n, image_c, image_h, image_w, PATCH, BATCH)[None, :]
            own = tl.load(skip + at, mask=within, other=0.0).to(tl.float32)
            if sums is not None:
                over_channels += tl.sum(tl.where(within, piece + own, 0.0), axis=1)
            at = target_pixel[:, None]
            at += channel_offset(c, target_n, target_c, target_h, target_w, PATCH, BATCH)[None, :]
            tl.store(target + at, (piece + 2 * own).to(target.dtype.element_ty), mask=within)
        else:
            within = inside[:, None] if N % BLOCK_N == 0 else inside[:, None] & (c < N)[None, :]
            if EPILOGUE == "relu_gradient" or EPILOGUE == "silu_gradient":
                at = (row - saved_row).to(tl.int64)[:, None] * N + c[None, :]
                before = tl.load(saved + at, mask=within, other=0.0).to(tl.float32)
                piece = activation_gradient(piece, before, "relu" if EPILOGUE == "relu_gradient" else "silu")
            elif EPILOGUE == "relu":
                piece = activate(piece, "relu")
            at = (row - target_row).to(tl.int64)[:, None] * N + c[None, :]
            tl.store(target + at, piece.to(target.dtype.element_ty), mask=within)
    if sums is not None:
        tl.store(sums + tile_n.to(tl.int64) * num_positions + row, over_channels, mask=inside)
