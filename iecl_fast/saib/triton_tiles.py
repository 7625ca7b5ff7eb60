"""Triton pieces that the kernels of SAIB share: where a position lies, how a tile is read, what an activation does.

Both channel modes are one problem: features of D channels over images of ``extent_a`` x ``extent_b`` positions.

* channels_are_batch: one image, R x p*p; its channels are the samples. A position (a, b) is a pixel of every sample.
* else: one image of (H/p) x (W/p) per sample; a channel is a colour and a place (i, j) within the patch.

In memory a pixel of X lies at offset(position) + offset(channel) in either mode, so patchify and unpatchify are
addresses. Features between the products are *rows*: (positions in patch order, channels), channels contiguous and
rounded up to a multiple of 16. Products that touch X or X' take positions in the image's own order (within a strip of
patches line by line), so that neighbouring positions are neighbours in memory; others take rows as they come. A strip
(channels_are_batch) or a sample has the same numbers in either order.
"""

import triton
import triton.language as tl


@triton.jit
def positions_of(
    m, grid_height, grid_width, stride_n, stride_c, stride_h, stride_w, PATCH: tl.constexpr, BATCH: tl.constexpr
):
    """Of positions ``m`` in image order: row (patch order), a, b, and the offset of its pixel (int64)."""
    if BATCH:
        width = grid_width * PATCH
        strip = m // (PATCH * width)
        i = (m // width) % PATCH
        w = m % width
        a = strip * grid_width + w // PATCH
        b = i * PATCH + w % PATCH
        row = a * (PATCH * PATCH) + b
        line = (strip % grid_height) * PATCH + i
        channel = strip // grid_height
        pixel = channel.to(tl.int64) * stride_c + line.to(tl.int64) * stride_h + w.to(tl.int64) * stride_w
    else:
        sample = m // (grid_height * grid_width)
        cell = m % (grid_height * grid_width)
        a = cell // grid_width
        b = cell % grid_width
        row = m
        pixel = sample.to(tl.int64) * stride_n + a.to(tl.int64) * PATCH * stride_h + b.to(tl.int64) * PATCH * stride_w
    return row, a, b, pixel


@triton.jit
def places_of(row, extent_a, extent_b):
    """a, b of rows (patch order)."""
    return (row // extent_b) % extent_a, row % extent_b


@triton.jit
def channel_offset(k, stride_n, stride_c, stride_h, stride_w, PATCH: tl.constexpr, BATCH: tl.constexpr):
    """Offset of channel ``k`` in the image (int64)."""
    if BATCH:
        offset = k.to(tl.int64) * stride_n
    else:
        colour = k // (PATCH * PATCH)
        i = (k // PATCH) % PATCH
        j = k % PATCH
        offset = colour.to(tl.int64) * stride_c + i.to(tl.int64) * stride_h + j.to(tl.int64) * stride_w
    return offset


@triton.jit
def tap_rows(row, a, b, inside, tap, extent_a, extent_b, SIGN: tl.constexpr):
    """Rows of the neighbours under tap 0..8 of a 3x3 (SIGN 1) or of its transpose (SIGN -1), and which exist."""
    da = (tap // 3 - 1) * SIGN
    db = (tap % 3 - 1) * SIGN
    exists = inside & (a + da >= 0) & (a + da < extent_a) & (b + db >= 0) & (b + db < extent_b)
    return row + da * extent_b + db, exists


@triton.jit
def load_rows(rows, row, exists, k, first_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """Tile (row, k), BLOCK channels, of features ``rows`` (.., WIDTH) that start at ``first_row``; 0 where none is."""
    at = (row - first_row).to(tl.int64)[:, None] * WIDTH + k[None, :]
    if WIDTH % BLOCK == 0:
        tile = tl.load(rows + at, mask=exists[:, None], other=0.0)
    else:
        tile = tl.load(rows + at, mask=exists[:, None] & (k < WIDTH)[None, :], other=0.0)
    if ACTIVATION != "none":
        tile = activate(tile.to(tl.float32), ACTIVATION).to(tile.dtype)
    return tile


@triton.jit
def load_weight(
    weight, tap, n, k, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Tile (k, n) of one tap of a packed weight: (taps, N, K), or of its transpose: (taps, K, N)."""
    at = k[:, None] * N + n[None, :] if TRANSPOSED else n[None, :] * K + k[:, None]
    if K % BLOCK_K == 0 and N % BLOCK_N == 0:
        tile = tl.load(weight + tap * (N * K) + at)
    else:
        tile = tl.load(weight + tap * (N * K) + at, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
    return tile


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)  # a NaN stays one
    elif ACTIVATION == "silu":
        z = z * tl.sigmoid(z)
    return z


@triton.jit
def activation_gradient(gradient, saved, ACTIVATION: tl.constexpr):
    """Gradient before the activation. ``saved`` is what came before SiLU; before or after ReLU."""
    if ACTIVATION == "relu":
        gradient = tl.where(saved <= 0, 0.0, gradient)
    else:
        s = tl.sigmoid(saved)
        gradient = gradient * s * (1.0 + saved * (1.0 - s))
    return gradient


@triton.jit
def position_term(position, columns, row, cells, inside, n, N: tl.constexpr, BATCH: tl.constexpr):
    """What the positional embedding adds to a tile (row, n).

    channels_are_batch: position[row] * columns[n] (columns None: 1). Else: position[row % cells, n] of width N.
    """
    if BATCH:
        term = tl.load(position + row, mask=inside, other=0.0).to(tl.float32)[:, None]
        if columns is not None:
            term = term * tl.load(columns + n, mask=n < N, other=0.0)[None, :]
    else:
        at = (row % cells).to(tl.int64)[:, None] * N + n[None, :]
        term = tl.load(position + at, mask=inside[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
    return term


@triton.jit
def part(tile, Q: tl.constexpr, PARTS: tl.constexpr):
    """Part Q of PARTS (a power of two) of the columns. A long epilogue on a part at a time needs fewer registers."""
    if PARTS == 1:
        result = tile
    else:
        left, right = tl.split(tl.permute(tl.reshape(tile, [tile.shape[0], 2, tile.shape[1] // 2]), (0, 2, 1)))
        result = part(left if Q < PARTS // 2 else right, Q % (PARTS // 2), PARTS // 2)
    return result
