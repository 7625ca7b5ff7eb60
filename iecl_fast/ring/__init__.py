"""Ring negatives: stored keys between two percentiles of similarity to the query."""

from iecl_fast.ring.functional import ring_info_nce, ring_sample
from iecl_fast.ring.percentiles import ring_ranks
from iecl_fast.ring.schedule import AdaptiveRingSchedule, RingSchedule

__all__ = ["AdaptiveRingSchedule", "RingSchedule", "ring_info_nce", "ring_ranks", "ring_sample"]
