"""The annealed lower percentile of Ring."""


class RingSchedule:
    """Percentiles ``(lower, upper)`` of the ring for each training step.

    The lower percentile moves linearly from ``lower[0]`` at step 0 to ``lower[1]`` at step ``steps`` and stays there
    (Wu et al., "Conditional Negative Sampling for Contrastive Learning of Visual Representations", section 4: w_l is
    annealed towards w_u so that training starts with easy negatives). The result depends on the step alone, so a
    resumed run goes on exactly.

    Args:
        lower: percentile at the start and at the end, or one number to keep it there.
        upper: percentile of the outer edge, constant.
        steps: optimiser steps over which the lower percentile moves; at least 1.

    Raises:
        ValueError: if a percentile is outside 0..100, ``lower`` does not stay below ``upper``, or ``steps < 1``.
    """

    def __init__(self, lower: float | tuple[float, float] = (0, 90), upper: float = 99, *, steps: int):
        start, end = (lower, lower) if isinstance(lower, int | float) else lower
        for name, value in (("lower", start), ("lower", end), ("upper", upper)):
            if not 0 <= value <= 100:
                raise ValueError(f"{name} = {value} is not allowed: a percentile lies in 0..100")
        if not max(start, end) < upper:
            raise ValueError(f"lower = {lower} is not allowed: it has to stay below upper = {upper}")
        if steps < 1:
            raise ValueError(f"steps = {steps} is not allowed: at least 1")
        self.start, self.end, self.upper, self.steps = float(start), float(end), float(upper), int(steps)

    def __call__(self, step: int) -> tuple[float, float]:
        """Percentiles at an optimiser step, counted from 0."""
        if step < 0:
            raise ValueError(f"step = {step} is not allowed: at least 0")
        progress = min(step, self.steps) / self.steps
        return self.start + (self.end - self.start) * progress, self.upper

    def state_dict(self) -> dict[str, float]:
        return {"start": self.start, "end": self.end, "upper": self.upper, "steps": self.steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Raises:
        ValueError: if ``state`` has other keys than :meth:`state_dict`.
        """
        if state.keys() != self.state_dict().keys():
            raise ValueError(f"state has the keys {sorted(state)}, expected {sorted(self.state_dict())}")
        self.__init__((state["start"], state["end"]), state["upper"], steps=int(state["steps"]))

    def __repr__(self) -> str:
        return f"RingSchedule(lower=({self.start:g}, {self.end:g}), upper={self.upper:g}, steps={self.steps})"
