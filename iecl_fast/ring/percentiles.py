"""From percentiles of similarity to ranks, exactly."""

from fractions import Fraction


def ring_ranks(lower: float, upper: float, num_keys: int) -> tuple[int, int]:
    """Ascending ranks ``(ceil(lower * K / 100), ceil(upper * K / 100))`` of a ring: the first kept, the first not kept.

    Percentiles are taken as the decimal numbers they are written as, not as the binary numbers next to them: 0.07
    percent of 10000 keys is rank 7, where ``ceil(0.07 * 10000 / 100)`` is 8.

    Raises:
        ValueError: if a percentile is NaN or outside 0..100, if ``lower >= upper``, or if no rank lies between them.
    """
    for name, value in (("lower", lower), ("upper", upper)):
        if not 0 <= value <= 100:  # false for NaN too
            raise ValueError(f"{name} = {value} is not allowed: a percentile lies in 0..100")
    if not lower < upper:
        raise ValueError(f"lower = {lower}, upper = {upper} is not allowed: lower has to be less than upper")
    shares = (Fraction(repr(float(value))) / 100 for value in (lower, upper))
    # Integers alone, rounded up: exact for any number of keys, and torch.compile may leave that number open.
    first, end = (-(-share.numerator * num_keys // share.denominator) for share in shares)
    if first == end:
        raise ValueError(
            f"lower = {lower}, upper = {upper} keep no key: with {num_keys} candidate keys both fall on rank {first}; "
            "widen the ring or take more keys"
        )
    return first, end
