"""Any schedule of the ring: within its bounds at every step, one way only, the same after a save, else refused."""

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iecl_fast import RingSchedule
from iecl_fast.ring import AdaptiveRingSchedule, ring_ranks
from iecl_fast.ring.schedule import SHAPES

numbers = st.floats(0, 100) | st.integers(0, 100) | st.integers(0, 1000).map(lambda n: n / 10)
anything = numbers | st.floats() | st.integers(-5, 200)


@st.composite
def paths(draw):
    """lower, upper: with upper as close as floats allow, too."""
    *lower, upper = sorted(draw(st.lists(numbers, min_size=3, max_size=3)))
    lower = draw(st.permutations(lower))
    return (lower[0] if draw(st.booleans()) else tuple(lower)), upper


@given(paths(), st.integers(1, 10**6), st.sampled_from(SHAPES), st.integers(1, 30), st.data())
def test_any_step_of_any_schedule(path, steps, shape, stages, data):
    lower, upper = path
    start, end = lower if isinstance(lower, tuple) else (lower, lower)
    if max(start, end) >= upper:
        with pytest.raises(ValueError, match="lower"):
            RingSchedule(lower, upper, steps=steps, shape=shape, stages=stages)
        return
    schedule = RingSchedule(lower, upper, steps=steps, shape=shape, stages=stages)
    some = data.draw(st.lists(st.integers(0, 2 * steps), max_size=6))
    some = sorted({0, 1, steps - 1, steps, *some})
    lowers = []
    for step in some:
        now, outer = schedule(step)
        assert schedule(step) == (now, outer) and outer == upper
        assert min(start, end) <= now <= max(start, end) < outer
        lowers.append(now)
        ring_ranks(now, outer, 10**30)  # a ring that takes keys, however narrow
    assert lowers[0] == start or steps == 1
    assert lowers[-1] == schedule(steps)[0] == end
    assert lowers == sorted(lowers, reverse=start > end)
    other = RingSchedule(steps=1)
    other.load_state_dict(schedule.state_dict())
    assert [other(step) for step in some] == [schedule(step) for step in some] and repr(other) == repr(schedule)


@given(anything | st.tuples(anything, anything), anything, st.integers(-2, 9), st.text(max_size=6), st.integers(-1, 3))
def test_what_is_refused_is_refused_with_a_message(lower, upper, steps, shape, stages):
    shape = shape if shape not in ("", "l") else "linear"
    try:
        schedule = RingSchedule(lower, upper, steps=steps, shape=shape, stages=stages)
    except ValueError as error:
        assert "not allowed" in str(error)
    else:
        inner, outer = schedule(0)
        assert 0 <= inner < outer <= 100


@given(paths(), st.integers(1, 12), st.lists(st.floats(), max_size=40), st.integers(0, 40))
def test_adaptive_is_never_ahead_of_the_linear_one_and_never_goes_back(path, steps, losses, halt):
    lower, upper = path
    start, end = lower if isinstance(lower, tuple) else (lower, lower)
    if max(start, end) >= upper:
        return
    schedule, linear = AdaptiveRingSchedule(lower, upper, steps=steps), RingSchedule(lower, upper, steps=steps)
    expected = []
    for count, loss in enumerate(losses):
        before = int(schedule.parts)
        schedule.observe(loss)
        assert before <= int(schedule.parts) <= min(steps, count + 1)
        expected.append(schedule(count))
        assert expected[-1] == linear(int(schedule.parts))
    resumed = AdaptiveRingSchedule(lower, upper, steps=steps)
    for loss in losses[:halt]:
        resumed.observe(loss)
    file = io.BytesIO()
    torch.save(resumed.state_dict(), file)
    file.seek(0)
    resumed = AdaptiveRingSchedule(lower, upper, steps=steps)
    resumed.load_state_dict(torch.load(file))
    rest = []
    for count, loss in enumerate(losses[halt:], halt):
        resumed.observe(loss)
        rest.append(resumed(count))
    assert rest == expected[halt:]
