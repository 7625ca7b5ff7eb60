"""The learning rate as a pure function of the step, so that a resumed run has nothing to restore."""

import math


def learning_rate(step, *, peak, schedule, steps_per_epoch, total_steps):
    """Learning rate of one optimiser step.

    Args:
        step: steps already taken, 0 .. total_steps - 1.
        peak: the highest rate.
        schedule: `ScheduleConfig`.
        steps_per_epoch, total_steps: of the whole run.

    Returns:
        float. After the linear warm-up, which reaches `peak` at its end: "cosine" is half a period of the cosine down
        to 0 (Loshchilov and Hutter, 2017), "step" multiplies by `gamma` at each milestone (MoCo v1), "constant" is
        `peak`.
    """
    warmup_steps = round(schedule.warmup_epochs * steps_per_epoch)
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule.name == "cosine":
        done = (step - warmup_steps) / (total_steps - warmup_steps)
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    if schedule.name == "step":
        passed = sum(step >= milestone * steps_per_epoch for milestone in schedule.milestones)
        return peak * schedule.gamma**passed
    return peak
