"""Ring negatives and incremental-entropy contrastive learning with C++, CUDA and Triton kernels."""

from iecl_fast import _interrupted  # noqa: F401 (before torch is imported, which takes seconds)
from iecl_fast.memory import MemoryBank, MemoryQueue
from iecl_fast.ring import RingSchedule, ring_info_nce, ring_sample
from iecl_fast.saib import SAIB
from iecl_fast.spectral import remove_spectral_norm, spectral_norm

__all__ = [
    "SAIB",
    "MemoryBank",
    "MemoryQueue",
    "RingSchedule",
    "remove_spectral_norm",
    "ring_info_nce",
    "ring_sample",
    "spectral_norm",
]
__version__ = "0.1.0"
