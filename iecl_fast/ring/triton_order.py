"""Total order of similarities and membership in the ring, for all Triton kernels: one definition, so that they agree.

Every kernel compares *order keys*, int32 numbers in the order of the float32 similarities they come from, and bounds a
ring by pairs (threshold, tie) of an order key and a key index: key ``j`` with order key ``k`` lies below such a
boundary if ``k < threshold``, or ``k == threshold`` and ``j < tie``. Order keys are integers and similarities are
rounded once, where they are formed; from there on no arithmetic is left in which two passes could differ.
"""

import triton
import triton.language as tl

NAN_KEY = tl.constexpr(0x7FFFFFFF)
LOWEST_KEY = tl.constexpr(-0x80000000)  # below that of -inf: of no similarity


@triton.jit
def order_key(similarity):
    """float32 to int32, ascending: -0 as 0, every NaN above +inf."""
    bits = (similarity + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(similarity == similarity, key, NAN_KEY)


@triton.jit
def similarity_of(key):
    """The similarity with an order key; -inf for the key of none."""
    similarity = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(key == LOWEST_KEY, float("-inf"), similarity)


@triton.jit
def below(key, index, threshold, tie):
    """Whether keys lie below a boundary. Boundaries as from :func:`load_boundary`; all shapes broadcast."""
    return key <= threshold - (index >= tie).to(tl.int32)


@triton.jit
def load_boundary(thresholds, ties, at, mask):
    """Boundaries (threshold int32, tie int32) for :func:`below`; fewer than 2^31 keys are taken for granted."""
    threshold = tl.load(thresholds + at, mask=mask, other=0)
    tie = tl.load(ties + at, mask=mask, other=0)
    # One above the lowest key there is no similarity either, and ``below`` may subtract one.
    return tl.maximum(threshold, LOWEST_KEY + 1), tl.minimum(tie, 0x7FFFFFFF).to(tl.int32)
