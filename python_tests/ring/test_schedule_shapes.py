import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iecl_fast import RingSchedule
from iecl_fast.ring import AdaptiveRingSchedule


def test_cosine_is_half_a_period():
    schedule = RingSchedule(lower=(10, 90), upper=99, steps=100, shape="cosine")
    for step in (0, 1, 37, 50, 99, 100, 400):
        done = min(step, 100) / 100
        assert schedule(step) == (pytest.approx(10 + 80 * (1 - math.cos(math.pi * done)) / 2), 99)
    assert schedule(100) == (90, 99)


def test_step_jumps_at_equal_distances():
    schedule = RingSchedule(lower=(0, 90), upper=99, steps=10, shape="step", stages=3)
    # The jumps are at 10/3, 20/3 and 10: the first steps at or after them are 4, 7 and 10.
    assert [schedule(step)[0] for step in range(12)] == [0] * 4 + [30] * 3 + [60] * 3 + [90] * 2


@given(
    st.sampled_from(["linear", "step", "cosine"]),
    st.floats(0, 98),
    st.floats(0, 98),
    st.integers(1, 50),
    st.integers(1, 60),
)
def test_every_shape_goes_from_start_to_end_and_never_back(shape, start, end, steps, stages):
    schedule = RingSchedule(lower=(start, end), upper=99, steps=steps, shape=shape, stages=stages)
    lowers = [schedule(step)[0] for step in range(steps + 2)]
    assert lowers[0] == start and lowers[-1] == lowers[-2] == end
    signs = {(after > before) - (after < before) for before, after in itertools.pairwise(lowers)}
    assert signs <= {0, (end > start) - (end < start)}


@pytest.mark.parametrize("shape", ["step", "cosine"])
def test_state_and_repr_hold_the_shape(shape):
    schedule = RingSchedule(lower=(10, 60), upper=95, steps=1000, shape=shape, stages=4)
    other = RingSchedule(steps=1)
    other.load_state_dict(schedule.state_dict())
    assert [other(step) for step in range(0, 1100, 50)] == [schedule(step) for step in range(0, 1100, 50)]
    assert f"shape='{shape}'" in repr(other)


def test_the_lesions_are_values():
    assert RingSchedule(lower=90, upper=99, steps=5)(0) == RingSchedule(lower=90, upper=99, steps=5)(9) == (90, 99)
    assert RingSchedule(lower=(0, 90), upper=100, steps=4)(2) == (45, 100)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shape": "sine"}, "shape = 'sine' is not allowed: one of linear, step, cosine"),
        ({"stages": 0}, "stages = 0"),
        ({"steps": math.nan}, "steps = nan is not allowed: a whole number, at least 1"),
        ({"steps": math.inf}, "steps = inf is not allowed"),
        ({"steps": 1.5}, "steps = 1.5 is not allowed"),
        ({"lower": (0, 50, 90)}, r"lower = \(0, 50, 90\) is not allowed: one percentile, or those at the start and"),
    ],
)
def test_errors_of_shapes(options, words):
    with pytest.raises(ValueError, match=words):
        RingSchedule(**{"steps": 5} | options)


def test_no_step_is_nan():
    with pytest.raises(ValueError, match="step = nan is not allowed"):
        RingSchedule(steps=5)(math.nan)


def test_adaptive_closes_while_the_loss_does_not_rise():
    schedule = AdaptiveRingSchedule(lower=(0, 90), upper=99, steps=100)
    assert schedule(0) == (0, 99)
    for step in range(50):
        schedule.observe(5 - 0.01 * step)
    assert schedule(50) == (45, 99)  # a falling loss: as fast as the linear one
    for _ in range(3):
        schedule.observe(8.0)
    resting = schedule(53)
    for _ in range(20):
        schedule.observe(8.0)
    assert schedule(73) == resting and resting[0] < 48  # it stopped within the three steps and waits
    for _ in range(300):
        schedule.observe(4.5)
    assert schedule(373) == (90, 99) and schedule.parts == 100


def test_adaptive_ignores_what_is_not_finite():
    schedule = AdaptiveRingSchedule(steps=10)
    for loss in (math.nan, 3.0, math.inf, 3.0):
        schedule.observe(loss)
    assert schedule.parts == 2 and schedule.quick == schedule.slow == 3.0


def test_adaptive_resumes_exactly():
    losses = torch.linspace(5, 4, 80, dtype=torch.float64) + 0.3 * torch.sin(torch.arange(80.0) / 5)
    whole = AdaptiveRingSchedule(lower=(0, 50), steps=100)
    expected = []
    for loss in losses.tolist():
        whole.observe(loss)
        expected.append(whole(0))
    halted = AdaptiveRingSchedule(lower=(0, 50), steps=100)
    for loss in losses[:33].tolist():
        halted.observe(loss)
    resumed = AdaptiveRingSchedule(lower=(0, 50), steps=100)
    resumed.load_state_dict(halted.state_dict())
    rest = []
    for loss in losses[33:].tolist():
        resumed.observe(loss)
        rest.append(resumed(0))
    assert rest == expected[33:]
    assert len(set(expected)) > 20 and expected[-1][0] < 40  # neither at rest nor done
