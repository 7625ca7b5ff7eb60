"""Counting the steps of a training, and what follows from the count."""

from typing import Any

import torch
from torch import Tensor, nn

from iecl_fast.ring import AdaptiveRingSchedule, RingSchedule


class Stepped(nn.Module):
    """Base of what is trained in steps and takes other negatives at each.

    Numbers that depend on the step would be constants of a compiled forward pass, compiled anew at every step. So the
    pass reads none: between the steps :meth:`look_up_step` puts the percentiles into a tensor, which is data to it, and
    what else the step decides into plain attributes, for each of whose few values it is compiled once. A subclass calls
    it at the end of ``__init__``; loading a state_dict does.

    Args:
        ring: percentiles of the negatives; None takes all of them.

    Attributes:
        step: int64 scalar buffer, steps so far. It drives ``ring`` and resumes with the state_dict.
    """

    step: Tensor

    def __init__(self, ring: RingSchedule | AdaptiveRingSchedule | None = None):
        super().__init__()
        self.ring = ring
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self._percentiles = torch.tensor([0.0, 100.0], dtype=torch.float64)  # no buffer: it stays on the CPU
        self.register_load_state_dict_post_hook(_after_loading)

    def percentiles(self) -> tuple[float, float]:
        """Lower and upper percentile of the negatives at the current step."""
        return (0.0, 100.0) if self.ring is None else self.ring(int(self.step))

    def percentiles_of_forward(self) -> tuple[float, float] | tuple[Tensor, Tensor]:
        """The same for the forward pass: float64 tensors if they change with the step."""
        return (0.0, 100.0) if self.ring is None else self._percentiles.unbind()

    def count_step(self) -> None:
        self.step += 1
        self.look_up_step()

    def look_up_step(self) -> None:
        """Derive what the next forward pass needs of the step; also after an adaptive ring was told a loss."""
        if self.ring is not None:
            self._percentiles.copy_(torch.tensor(self.percentiles(), dtype=torch.float64))


def _after_loading(module: Stepped, _: Any) -> None:
    module.look_up_step()
