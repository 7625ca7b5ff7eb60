"""Triton: gradients of SAIB's weights, sums over all positions in a fixed order."""

import triton
import triton.language as tl

from iecl_fast.saib.triton_tiles import channel_offset, load_rows, part, places_of, positions_of, tap_rows


# partial[split, tap, o, k] = sum over the split's positions m of gradient[m, o] * features[m + tap, k].
#
# Operations: 2 * positions * taps * O * K. Bytes: positions * (O + K) * size if each is read once; a program reads
# BLOCK_O + BLOCK_I channels of each position, so at 128 x 128 tiles and 16 bits the second-level cache delivers a byte
# for every 64 operations. Bound by arithmetic like the product that it belongs to. How many splits there are follows
# from the shape alone: the same bits on every chip and in every run.
@triton.jit(do_not_specialize=["gradient_row", "features_row", "accumulate", "span"])
def weight_gradient_kernel(
    gradient,  # rows (.., O), or an image
    features,  # rows (.., K), or an image
    partial,  # float32 (splits, TAPS, O, K)
    position,  # embedding in patch order, to be added to every channel of the image ``features``; or None
    first,  # positions first .. first + count - 1, in image order
    count,
    span,  # positions of one split
    gradient_row,  # rows of gradient and features start at this one
    features_row,
    accumulate,  # add to what is there
    grid_height,
    grid_width,
    extent_a,
    extent_b,
    image_n,
    image_c,
    image_h,
    image_w,
    D: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    TAPS: tl.constexpr,
    GRADIENT_IMAGE: tl.constexpr,
    FEATURES_IMAGE: tl.constexpr,
    GRADIENT_ACTIVATION: tl.constexpr,  # of gradient rows
    LOAD_ACTIVATION: tl.constexpr,  # of feature rows
    PATCH: tl.constexpr,
    BATCH: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    tiles_o: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
    tiles_k: tl.constexpr = (K + BLOCK_I - 1) // BLOCK_I
    program = tl.program_id(0)
    tile_o = program % tiles_o
    tile_k = (program // tiles_o) % tiles_k
    tap = (program // (tiles_o * tiles_k)) % TAPS
    split = program // (tiles_o * tiles_k * TAPS)
    o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tile_k * BLOCK_I + tl.arange(0, BLOCK_I)

    total = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    embedded = tl.zeros([BLOCK_O], tl.float32)
    for start in range(split * span, tl.minimum(split * span + span, count), BLOCK_P):
        local = start + tl.arange(0, BLOCK_P)
        inside = local < count
        if GRADIENT_IMAGE or FEATURES_IMAGE:
            row, a, b, pixel = positions_of(
                first + local, grid_height, grid_width, image_n, image_c, image_h, image_w, PATCH, BATCH
            )
        else:
            row = first + local
            a, b = places_of(row, extent_a, extent_b)
        if GRADIENT_IMAGE:
            place = pixel[:, None] + channel_offset(o, image_n, image_c, image_h, image_w, PATCH, BATCH)[None, :]
            slope = tl.load(gradient + place, mask=inside[:, None] & (o < D)[None, :], other=0.0)
        else:
            slope = load_rows(gradient, row, inside, o, gradient_row, O, BLOCK_O, GRADIENT_ACTIVATION)
        if FEATURES_IMAGE:
            place = pixel[:, None] + channel_offset(k, image_n, image_c, image_h, image_w, PATCH, BATCH)[None, :]
            tile = tl.load(features + place, mask=inside[:, None] & (k < D)[None, :], other=0.0)
        elif TAPS == 1:
            tile = load_rows(features, row, inside, k, features_row, K, BLOCK_I, LOAD_ACTIVATION)
        else:
            neighbour, exists = tap_rows(row, a, b, inside, tap, extent_a, extent_b, 1)
            tile = load_rows(features, neighbour, exists, k, features_row, K, BLOCK_I, LOAD_ACTIVATION)
        total = tl.dot(tl.trans(slope), tile, total, input_precision=PRECISION)
        if position is not None:
            own = tl.load(position + row, mask=inside, other=0.0).to(tl.float32)
            embedded += tl.sum(slope.to(tl.float32) * own[:, None], axis=0)

    if position is not None:
        total += embedded[:, None]
    # 32 columns at a time, or the registers do not suffice.
    PARTS: tl.constexpr = BLOCK_I // 32
    for q in tl.static_range(PARTS):
        piece = part(total, q, PARTS)
        c = tile_k * BLOCK_I + q * 32 + tl.arange(0, 32)
        at = ((split * TAPS + tap).to(tl.int64) * O + o[:, None]) * K + c[None, :]
        within = (o < O)[:, None] & (c < K)[None, :]
        piece += tl.load(partial + at, mask=within & (accumulate != 0), other=0.0)
        tl.store(partial + at, piece, mask=within)


# gradient[o, k, tap] = sum over splits, in their order, of partial[split, tap, o, k]: one read of partial, bound by it.
@triton.jit(do_not_specialize=["size"])
def ordered_sum_kernel(
    partial,  # float32 (splits, taps, O, K)
    target,  # weight gradient (outputs, inputs, height, width)
    splits,
    size,  # outputs * inputs * taps
    outputs,
    inputs,
    stride_o,
    stride_i,
    stride_height,
    stride_width,
    TAPS: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    k = index % inputs
    o = (index // inputs) % outputs
    tap = index // inputs // outputs
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        at = ((split * TAPS + tap).to(tl.int64) * O + o) * K + k
        total += tl.load(partial + at, mask=inside, other=0.0)
    side: tl.constexpr = 3 if TAPS == 9 else 1
    at = o.to(tl.int64) * stride_o + k.to(tl.int64) * stride_i
    at += (tap // side) * stride_height + (tap % side) * stride_width
    tl.store(target + at, total.to(target.dtype.element_ty), mask=inside)
