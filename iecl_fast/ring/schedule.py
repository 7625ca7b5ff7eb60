"""The annealed lower percentile of Ring."""

import math

import torch
from torch import Tensor, nn

SHAPES = ("linear", "step", "cosine")


class RingSchedule:
    """Percentiles ``(lower, upper)`` of the ring for each training step.

    The lower percentile moves from ``lower[0]`` at step 0 to ``lower[1]`` at step ``steps`` and stays there (Wu et al.,
    "Conditional Negative Sampling for Contrastive Learning of Visual Representations", section 4: w_l is annealed
    towards w_u so that training starts with easy negatives). The result depends on the step alone, so a resumed run
    goes on exactly. The paper's lesions are values, too: ``lower=90`` does not anneal, ``upper=100`` makes the ring a
    ball.

    Args:
        lower: percentile at the start and at the end, or one number to keep it there.
        upper: percentile of the outer edge, constant.
        steps: optimiser steps over which the lower percentile moves; at least 1.
        shape: ``"linear"``; ``"cosine"``, half a period: slow at both ends; ``"step"``, by jumps.
        stages: equal jumps of ``"step"``, at equal distances, the last at step ``steps``.

    Raises:
        ValueError: if a percentile is outside 0..100, ``lower`` does not stay below ``upper`` or is more than two
            numbers, ``steps`` or ``stages`` is no whole number from 1 on, or there is no such shape.
    """

    def __init__(
        self,
        lower: float | tuple[float, float] = (0, 90),
        upper: float = 99,
        *,
        steps: int,
        shape: str = "linear",
        stages: int = 10,
    ):
        path = tuple(lower) if isinstance(lower, (tuple, list)) else (lower, lower)
        if len(path) != 2:
            raise ValueError(f"lower = {lower} is not allowed: one percentile, or those at the start and at the end")
        start, end = path
        for name, value in (("lower", start), ("lower", end), ("upper", upper)):
            if not 0 <= value <= 100:
                raise ValueError(f"{name} = {value} is not allowed: a percentile lies in 0..100")
        if not max(start, end) < upper:
            raise ValueError(f"lower = {lower} is not allowed: it has to stay below upper = {upper}")
        for name, value in (("steps", steps), ("stages", stages)):
            if not (value >= 1 and value == value // 1):
                raise ValueError(f"{name} = {value} is not allowed: a whole number, at least 1")
        if shape not in SHAPES:
            raise ValueError(f"shape = {shape!r} is not allowed: one of {', '.join(SHAPES)}")
        self.start, self.end, self.upper, self.steps = float(start), float(end), float(upper), int(steps)
        self.shape, self.stages = shape, int(stages)

    def __call__(self, step: int) -> tuple[float, float]:
        """Percentiles at an optimiser step, counted from 0."""
        if not step >= 0:
            raise ValueError(f"step = {step} is not allowed: at least 0")
        if step >= self.steps:
            return self.end, self.upper
        progress = step / self.steps
        if self.shape == "step":
            progress = step * self.stages // self.steps / self.stages
        elif self.shape == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.start + (self.end - self.start) * progress, self.upper

    def state_dict(self) -> dict[str, float | str]:
        names = ("start", "end", "upper", "steps", "shape", "stages")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, float | str]) -> None:
        """Raises:
        ValueError: if ``state`` has other keys than :meth:`state_dict`.
        """
        if state.keys() != self.state_dict().keys():
            raise ValueError(f"state has the keys {sorted(state)}, expected {sorted(self.state_dict())}")
        options = {name: state[name] for name in ("steps", "shape", "stages")}
        self.__init__((state["start"], state["end"]), state["upper"], **options)

    def __repr__(self) -> str:
        shape = "" if self.shape == "linear" else f", shape={self.shape!r}"
        stages = f", stages={self.stages}" if self.shape == "step" else ""
        path = f"lower=({self.start:g}, {self.end:g}), upper={self.upper:g}, steps={self.steps}"
        return f"RingSchedule({path}{shape}{stages})"


class AdaptiveRingSchedule(nn.Module):
    """A ring that closes only while the loss does not rise.

    Harder negatives raise the loss until the encoder has caught up with them. So the way from ``lower[0]`` to
    ``lower[1]`` is gone in ``steps`` equal parts, one at each step at which a quick running mean of the loss is not
    above a slow one: never faster than the linear schedule, and at rest while the last parts are digested. Whatever the
    loss's scale, there is no threshold to set.

    Its state is in buffers: a method that holds it as ``ring`` saves and restores it with its own state_dict. After
    each step it must be told the loss, the mean over all ranks (``iecl_fast.engine`` does so).

    Args:
        lower, upper, steps: as :class:`RingSchedule`'s; ``steps`` are the fewest in which the ring closes.

    Attributes:
        parts: int64 scalar, parts of the way gone so far.
        quick, slow: float64 scalars, running means over about 10 and 100 steps; NaN before the first.
    """

    parts: Tensor
    quick: Tensor
    slow: Tensor

    def __init__(self, lower: float | tuple[float, float] = (0, 90), upper: float = 99, *, steps: int):
        super().__init__()
        self.path = RingSchedule(lower, upper, steps=steps)
        self.register_buffer("parts", torch.zeros((), dtype=torch.int64))
        self.register_buffer("quick", torch.full((), torch.nan, dtype=torch.float64))
        self.register_buffer("slow", torch.full((), torch.nan, dtype=torch.float64))

    def forward(self, step: int) -> tuple[float, float]:
        """Percentiles now; the step does not matter beyond what :meth:`observe` was told."""
        return self.path(int(self.parts))

    def observe(self, loss: float) -> None:
        """The contrastive loss of a step. What is not finite, as in a step that a gradient scaler skips, is ignored."""
        if not math.isfinite(loss):
            return
        for mean, weight in ((self.quick, 0.1), (self.slow, 0.01)):
            old = float(mean)
            mean.fill_(loss if math.isnan(old) else old + weight * (loss - old))
        if self.quick <= self.slow:
            self.parts.add_(1).clamp_(max=self.path.steps)

    def extra_repr(self) -> str:
        return repr(self.path)
