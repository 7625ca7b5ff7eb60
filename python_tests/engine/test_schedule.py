"""Learning rates against the papers' formulas, written out."""

import pytest

from iecl_fast.engine.schedule import learning_rate
from iecl_fast.engine.settings import ScheduleConfig


def rates(schedule, steps_per_epoch, epochs, peak=0.03):
    total = steps_per_epoch * epochs
    return [
        learning_rate(step, peak=peak, schedule=schedule, steps_per_epoch=steps_per_epoch, total_steps=total)
        for step in range(total)
    ]


def test_step_schedule_of_moco_v1():
    values = rates(ScheduleConfig(name="step", milestones=(120, 160)), steps_per_epoch=2, epochs=200)
    assert values[:240] == [0.03] * 240
    assert values[240:320] == pytest.approx([0.003] * 80)
    assert values[320:] == pytest.approx([0.0003] * 80)


def test_cosine_halves_in_the_middle_and_ends_near_zero():
    values = rates(ScheduleConfig(name="cosine"), steps_per_epoch=10, epochs=10)
    assert values[0] == pytest.approx(0.03)
    assert values[25] == pytest.approx(0.03 * 0.8535533905932737)
    assert values[50] == pytest.approx(0.015)
    assert values[-1] == pytest.approx(0.03 * 0.0002467198171342, rel=1e-6)
    assert values == sorted(values, reverse=True)


def test_warm_up_rises_evenly_to_the_peak():
    values = rates(ScheduleConfig(name="constant", warmup_epochs=2), steps_per_epoch=2, epochs=4, peak=1.0)
    assert values == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 1.0])


def test_cosine_begins_after_the_warm_up():
    values = rates(ScheduleConfig(name="cosine", warmup_epochs=0.5), steps_per_epoch=10, epochs=10, peak=1.0)
    assert values[5] == 1.0
    assert values[4] < 1.0 > values[6]
