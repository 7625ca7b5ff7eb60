"""What ranks tell each other about parts that each holds alone: the few collectives of sharded banks, in one place."""

import torch
import torch.distributed as dist
from torch import Tensor


def world_size(group: "dist.ProcessGroup | None" = None) -> int:
    """Ranks of a process group of ``torch.distributed``, None being all of them; 1 without an initialised one."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


class Exchange:
    """The collectives of a process group. Without an initialised one, or in a group of one, nothing is sent.

    Every rank gets the same bits in every run, in whatever order messages arrive: integers are added, and numbers with
    rounding only moved, so that whoever adds them does so in rank order. All ranks have to call the same in turn.

    Args:
        group: of ``torch.distributed``; None is all ranks.

    Attributes:
        size: ranks of the group.
        rank: this process's place in it.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None):
        self.group = group
        self.size = world_size(group)
        self.rank = 0 if self.size == 1 else dist.get_rank(group)

    def total(self, integers: Tensor) -> Tensor:
        """The sum over all ranks of a tensor of integers, of one shape on all."""
        if self.size > 1:
            integers = integers.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(integers, group=self.group)
        return integers

    def stack(self, part: Tensor) -> Tensor:
        """All ranks' tensors, of one shape on all: (ranks, *shape)."""
        if self.size == 1:
            return part[None]
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.stack(parts)

    def rows(self, rows: Tensor, counts: list[int]) -> Tensor:
        """All ranks' rows one after the other; ``counts`` says how many each brings."""
        return self.route(rows.repeat(self.size, *[1] * (rows.dim() - 1)), [len(rows)] * self.size, counts)

    def route(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send each rank some of the rows, and get those it has for this one, one rank's after the other's.

        Args:
            rows: (sum of sent, ...), those for rank 0 first.
            sent, received: how many rows go to, and come from, each rank.
        """
        if self.size == 1:
            return rows
        moved = rows.new_empty((sum(received), *rows.shape[1:]))
        width = rows.shape[1:].numel()
        if width > 0:
            # As bytes: not every backend moves 16-bit numbers.
            to, of = (part.reshape(len(part), width).view(torch.uint8) for part in (moved, rows))
            dist.all_to_all_single(to, of, received, sent, group=self.group)
        return moved
