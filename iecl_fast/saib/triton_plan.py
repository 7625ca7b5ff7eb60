"""Which kernels run SAIB on a GPU, with which tiles: plain functions of shape, dtype and the chip's generation.

Nothing is tuned or looked up in a call, and every tile that can be returned is compiled ahead of time by the tests.
Into how many sums a weight's gradient is split follows from the shape alone. Numbers are of products over `positions`
(all pixels of one channel) of width D.

Split of the forward pass, by what stays on chip (16-bit types; the 2D channels of h2 for a tile of 128 positions):

* D <= 192: two kernels, W1 and everything after it. One kernel would have to form W1 P again under every tap of the
  3x3, 1.3 times the operations, to save one write and one read of h1; the chip is bound by operations.
* D > 192: one kernel a product. 128 positions of h2 are 128 KiB at D = 256, beside the tiles of the weights: it does
  not fit, and 64 ask the second-level cache for the weights twice as often. W3 and W4 alone in one kernel would save a
  write and a read of h3, 15 % of the forward pass in the model of bench/saib/roofline.py, but their loop within a loop
  waits for W4 at every turn, which that model does not see: to be decided by a measurement, like cuDNN's 3x3 at
  D >= 512 between our other kernels.
* float32: one kernel a product. h2 takes twice the space, and products in float32 are so slow that passes are cheap.
"""

from math import ceil
from typing import NamedTuple

MULTIPROCESSORS = 132  # of an H100; others have 108 to 148


class ProductTile(NamedTuple):
    """Of product_kernel: positions (m), outputs (n) and inputs (k) at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class TailTile(NamedTuple):
    """Of tail_kernel: positions (m), channels of h1 (k) and of h3 (t) at a time; h2 in ``slices`` of ``slice``."""

    block_m: int
    block_k: int
    block_t: int
    slice: int
    slices: int
    num_warps: int
    num_stages: int


class WeightTile(NamedTuple):
    """Of weight_gradient_kernel: outputs (o), inputs (i) and positions (p) at a time."""

    block_o: int
    block_i: int
    block_p: int
    num_warps: int
    num_stages: int


def padded(width: int) -> int:
    """Channels of features and packed weights: rows of 16-bit numbers stay aligned to 32 bytes."""
    return (width + 15) // 16 * 16


def _fills_256(width: int) -> bool:
    """Whether tiles of 256 channels compute no more than tiles of 128."""
    return ceil(width / 128) % 2 == 0


def product_tile(itemsize: int, positions: int, outputs: int, scattered: bool, hopper: bool) -> ProductTile:
    """``scattered``: an image is read or written whose pixels are not straight (see tail_tile).

    ``hopper``: a chip of compute capability 9.0 or more, whose products take their operands from shared memory. An
    older one holds them in registers. A large tile asks the second-level cache for less; it needs enough positions to
    keep a chip busy, twice over.
    """
    if itemsize == 4:
        return ProductTile(64, 64, 16, 8, 2) if hopper else ProductTile(64, 32, 16, 4, 2)
    if not hopper:
        return ProductTile(128, 128, 32, 8, 3) if outputs > 64 and not scattered else ProductTile(128, 64, 32, 8, 3)
    if outputs <= 64:
        return ProductTile(128, 64, 32, 4, 3)
    rows, columns = (128, 256) if _fills_256(outputs) else (256, 128)
    if not scattered and ceil(positions / rows) * ceil(outputs / columns) >= 2 * MULTIPROCESSORS:
        return ProductTile(rows, columns, 64, 8, 3)
    return ProductTile(128, 128, 64, 8, 3)


def tail_tile(itemsize: int, positions: int, width: int, silu: bool, straight: bool, hopper: bool) -> TailTile | None:
    """None: one kernel for each product. Otherwise the smallest of 2^k and 3 * 2^k channels that holds 2 ``width``.

    ``straight``: pixels of neighbouring positions are neighbours in memory, in aligned runs of 16. Where they are not,
    addresses take many registers, and SiLU takes some; then 2 ``width`` > 192 channels fit for 64 positions, not for
    128, and 2 ``width`` > 256 never do. Few positions are shared out to more multiprocessors.
    """
    if itemsize == 4 or width > 192:
        return None
    for slice, slices in ((32, 1), (64, 1), (32, 3), (128, 1), (64, 3), (256, 1), (128, 3)):
        if 2 * width <= slice * slices:
            break
    if width <= 48:
        return TailTile(128, 16, 32, slice, slices, 4, 2)
    fits = width <= 96 or (width <= 128 and straight and hopper and not silu)
    many = positions >= 128 * 2 * MULTIPROCESSORS
    return TailTile(128 if fits and many else 64, 64, 32, slice, slices, 8, 2)


def weight_tile(itemsize: int, outputs: int, inputs: int, from_image: bool, hopper: bool) -> WeightTile:
    """``from_image``: of w1 and w4, whose addresses take registers too."""
    if itemsize == 4:
        return WeightTile(64, 64, 16, 4, 2)
    if not hopper:
        return WeightTile(128, 64, 32, 8, 3)
    if max(outputs, inputs) <= 64:
        return WeightTile(64, 64, 64, 4, 3)
    if from_image or not (_fills_256(outputs) or _fills_256(inputs)):
        return WeightTile(128, 128, 64, 8, 3)
    return WeightTile(128, 256, 64, 8, 3) if _fills_256(inputs) else WeightTile(256, 128, 64, 8, 3)


def weight_splits(itemsize: int, positions: int, taps: int, outputs: int, inputs: int, from_image: bool) -> int:
    """Into how many sums a weight's gradient is split, by a model of an H100 whatever the chip: the same everywhere.

    Rounds of tiles over the multiprocessors, each at 4.5 TFLOP/s; and a write and a read of each sum at 3 TB/s.
    """
    tile = weight_tile(itemsize, outputs, inputs, from_image, True)
    tiles = taps * ceil(outputs / tile.block_o) * ceil(inputs / tile.block_i)

    def seconds(splits: int) -> float:
        rounds = ceil(tiles * splits / MULTIPROCESSORS)
        products = rounds * positions / splits * 2 * tile.block_o * tile.block_i / 4.5e12
        return products + splits * taps * outputs * inputs * 8 / 3e12

    return min(range(1, max(1, min(32, positions // 512)) + 1), key=seconds)


# A backward pass in one piece keeps 7 widths of gradients and features at a time. In pieces it keeps a part of them.
UNSPLIT_BYTES = 64 << 20
LEAST_UNITS = 4


def units_at_once(units: int, unit: int, width: int, itemsize: int) -> int:
    """Units (of ``unit`` positions) that one piece of a backward pass takes: about half the memory of what it reads.

    The forward pass saves 3 ``width`` a position, the pieces keep 7.
    """
    allowed = max(UNSPLIT_BYTES, units * unit * 3 * width * itemsize // 2)
    return min(units, max(LEAST_UNITS, allowed // (unit * 7 * width * itemsize)))
