"""Tile configurations of the Triton kernels: plain functions of dtype, precision and channels, for every device.

The numbers are those that compile for sm_80, sm_90 and sm_100 without spilled registers and within the shared memory
of the smallest of them (python_tests/ring/test_ahead_of_time.py), which is all that is known without a GPU.
"""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """What one program of a kernel takes at a time, and by how many warps."""

    rows: int  # queries
    keys: int
    channels: int  # taken at a time
    warps: int
    stages: int  # tiles in flight from global memory


def _channels(channels: int, most: int) -> int:
    """The power of two that holds all channels, 128 at least (few configurations) and ``most`` at most."""
    return min(max(128, 1 << (channels - 1).bit_length()), most)


def product(dtype: torch.dtype, channels: int) -> Tile:
    """Tiles of the similarities that are written."""
    if dtype == torch.float32:
        return Tile(64, 64, _channels(channels, 32), 4, 2)
    return Tile(128, 128, _channels(channels, 64), 8, 3)


def weigh(dtype: torch.dtype, precision: str, channels: int) -> Tile:
    """Tiles of similarities that are read, weighed and summed up with their keys; ``channels`` of a sum each."""
    if dtype == torch.float32:
        return Tile(64 if precision == "ieee" else 128, 32, _channels(channels, 128), 8, 2)
    return Tile(64, 64, _channels(channels, 128), 8, 3)


def keys_gradient(precision: str, channels: int) -> Tile:
    """Tiles of similarities that are read, weighed and summed up with their queries; ``channels`` of a sum each."""
    if precision == "ieee":
        return Tile(32, 64, _channels(channels, 64), 8, 2)
    return Tile(32, 64, _channels(channels, 128), 8, 3)


def recompute(channels: int) -> Tile:
    """Tiles of 16-bit similarities that are formed anew in every pass, the same in each; all channels at a time."""
    channels = _channels(channels, RECOMPUTED_CHANNELS)
    return Tile(64, 64 if channels <= 128 else 32, channels, 8, 2)


RECOMPUTED_CHANNELS = 256  # more do not fit on chip beside their weighted sums

# Keys whose weighted sum one accumulator takes: of all-equal data more would lose the last digits of the gradient.
LARGEST_SPLIT = 4096
# Programs that fill a chip, and so many partial sums that the last pass has to add up.
PROGRAMS = 256


def split_tiles(rows: int, num_keys: int, tile: Tile) -> int:
    """Tiles of keys in one split; by shape alone, so that no result depends on the chip."""
    row_blocks = -(-rows // tile.rows)
    splits = max(1, PROGRAMS // row_blocks, -(-num_keys // LARGEST_SPLIT))
    return -(-num_keys // (splits * tile.keys))
