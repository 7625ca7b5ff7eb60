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
        num_views: views of each image in a batch.
        step: int64 scalar buffer, steps so far. It drives ``ring`` and resumes with the state_dict.
    """

    num_views: int
    step: Tensor

    def __init__(self, ring: RingSchedule | AdaptiveRingSchedule | None = None):
        super().__init__()
        self.ring = ring
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self._percentiles = torch.tensor([0.0, 100.0], dtype=torch.float64)  # no buffer: it stays on the CPU
        self.register_load_state_dict_post_hook(_after_loading)

    def check_views(self, views: list[Tensor]) -> None:
        """Refuse what is no batch of images: tensors (N, 3, H, W), with the same N in each view.

        Raises:
            ValueError: another number of views, or batches of different sizes or without images.
            TypeError: a view is no floating-point tensor.
        """
        if len(views) != self.num_views:
            tensors = "1 tensor" if self.num_views == 1 else f"{self.num_views} tensors"
            raise ValueError(f"views must be a list of {tensors}, got {len(views)}")
        for view in views:
            if not isinstance(view, Tensor) or not view.is_floating_point():
                what = view.dtype if isinstance(view, Tensor) else type(view).__name__
                raise TypeError(f"views must be floating-point tensors (N, 3, H, W), got {what}")
            if view.dim() != 4 or len(view) != len(views[0]) or len(view) == 0:
                shapes = ", ".join(str(tuple(view.shape)) for view in views)
                raise ValueError(f"views must have shape (N, 3, H, W) with one N >= 1 for all, got {shapes}")

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
