"""Rows of all ranks with gradients to all of them, for losses that compare a batch with itself; what DDP is told."""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from iecl_fast.exchange import world_size
from iecl_fast.memory import gather_rows


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, start: int) -> Tensor:
        ctx.own = slice(start, start + len(rows))
        return gather_rows(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # what autograd hands over is not ours
        dist.all_reduce(gradient)
        return gradient[ctx.own], None


def gather_rows_with_gradient(rows: Tensor) -> tuple[Tensor, int]:
    """Concatenate the rows of all ranks in rank order, and say where this rank's begin.

    Backwards every rank gets the sum of what all ranks' losses want of its rows. DistributedDataParallel then averages
    over the ranks, so the gradient of the weights is that of the mean of the ranks' losses: what one process would have
    on the joined batch. Without an initialised process group, or in a group of one, the rows pass unchanged.

    Args:
        rows: (N, C); the ranks may bring different N.

    Returns:
        (sum of all N, C), and the index of the own first row in it.
    """
    if world_size() == 1:
        return rows, 0
    start = sum(batch_sizes(rows)[: dist.get_rank()])
    return _GatherRows.apply(rows, start), start


def batch_sizes(rows: Tensor) -> list[int]:
    """Number of rows on each rank."""
    return gather_rows(torch.tensor([len(rows)], device=rows.device)).tolist()


def own_buffers() -> dict[str, bool]:
    """The option that lets DistributedDataParallel leave buffers alone in a forward pass: the methods keep their queue
    or bank alike on all ranks themselves, and batch norm's statistics are each rank's own.

    torch 2.13 has given it another name.
    """
    names = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}
