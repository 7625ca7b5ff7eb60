"""Ring negatives and incremental-entropy contrastive learning with C++, CUDA and Triton kernels."""

from iecl_fast.memory import MemoryQueue
from iecl_fast.ring import RingSchedule, ring_info_nce, ring_sample

__all__ = ["MemoryQueue", "RingSchedule", "ring_info_nce", "ring_sample"]
__version__ = "0.1.0"
