"""Ring's Triton kernels on the CPU: its operators served by the plans for CUDA devices, in small tiles.

For files named interpreted_*.py, which test_interpreter.py runs with TRITON_INTERPRET=1.
"""

import pytest
import torch
from interpreted import only_in_interpreter

from iecl_fast.ring import dispatch, ops, plan_recompute, plans, ring_ranks, tiles, triton_select
from iecl_fast.ring.tiles import Tile

only_in_interpreter()


def serve_cpu_tensors() -> None:
    """From now on, in this process, CPU tensors take the way of CUDA tensors, with all kernels in Triton."""
    dispatch.library_missing = lambda: "the CUDA library does not take CPU tensors"
    ops._implement("CPU", dispatch.with_plans(ops._by_reference("CPU")))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that a small problem has several blocks of rows, of keys and of channels, splits, and chunks of rows."""
    monkeypatch.setattr(triton_select, "BLOCK", 1024)  # smaller in interpreted_selection.py
    monkeypatch.setattr(tiles, "product", lambda *_: Tile(16, 64, 16, 4, 1))
    monkeypatch.setattr(tiles, "weigh", lambda *_: Tile(16, 64, 16, 4, 1))
    monkeypatch.setattr(tiles, "keys_gradient", lambda *_: Tile(16, 64, 16, 4, 1))
    monkeypatch.setattr(tiles, "recompute", lambda channels: Tile(16, 64, 32 if channels <= 32 else 64, 4, 1))
    monkeypatch.setattr(tiles, "PROGRAMS", 4)
    monkeypatch.setattr(plan_recompute, "sample_size", lambda num_keys: min(num_keys, 256))
    monkeypatch.setattr(plan_recompute, "FALL_BACKS", 2)
    # Two chunks of 20 rows over 700 keys.
    monkeypatch.setattr(plans, "BUFFER_BYTES", 4 * 700 * 17)


def cpu_sample(query, keys, lower, upper, exclude=None, uniform=None):
    """What the C++ kernels select: similarities and indices."""
    num_keys = keys.shape[0]
    ranks = [*ring_ranks(lower, upper, num_keys), 0, 0]
    if exclude is not None:
        ranks[2:] = ring_ranks(lower, upper, num_keys - 1)
    return torch.ops.iecl_fast._ring_sample_cpu(query, keys, ranks, exclude, uniform, True)
