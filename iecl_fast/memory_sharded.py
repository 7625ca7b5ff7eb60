"""A memory bank too large for one device: each rank holds a part of it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from iecl_fast.exchange import Exchange
from iecl_fast.memory import Bank, check_index, check_keys, move_entries

ROWS_AT_ONCE = 65_536  # of what passes through one device on its way elsewhere


class ShardedMemoryBank(Bank):
    """:class:`iecl_fast.MemoryBank`, its entries spread over the ranks of ``torch.distributed``.

    Rank r of R holds the entries ``r * K // R .. (r + 1) * K // R - 1``, so that rank order is index order, as
    :mod:`iecl_fast.ring.sharded` has it. Without an initialised process group all of it is here. Entries have the bits
    that a MemoryBank would have: from the same seed, and after the same batches. They are no buffer, which
    DistributedDataParallel would make the same on all ranks.

    Its state_dict is a MemoryBank's: the whole bank, gathered piece by piece into the memory of rank 0's host, for a
    checkpoint that goes on with any number of ranks. So it is a collective, to be called on every rank; on others than
    rank 0 the entry is left out. ``load_state_dict`` takes the own part of the whole bank, on every rank.

    Args:
        num_items, dim, momentum: as of a MemoryBank.

    Attributes:
        start, end: the indices that this rank holds, without ``end``.
        keys: (end - start, C) float32, this rank's entries.
    """

    def __init__(self, num_items: int, dim: int, momentum: float = 0.5):
        super().__init__(num_items, dim, momentum)
        exchange = Exchange()
        self.place = exchange.rank, exchange.size
        self.ends = [(rank + 1) * num_items // exchange.size for rank in range(exchange.size)]
        self.start, self.end = exchange.rank * num_items // exchange.size, self.ends[exchange.rank]
        self.keys = torch.empty(self.end - self.start, dim)
        # All ranks draw all entries, a piece at a time, so that their random states stay alike. Pieces of a multiple of
        # 16 numbers are drawn as the whole would be.
        first = 0
        while first < num_items:
            last = first + ROWS_AT_ONCE
            last = num_items if (num_items - last) * dim < 16 else last
            piece = F.normalize(torch.randn(last - first, dim), dim=1)
            here = slice(max(first, self.start), min(last, self.end))
            if here.start < here.stop:
                self.keys[here.start - self.start : here.stop - self.start] = piece[
                    here.start - first : here.stop - first
                ]
            first = last

    @torch.no_grad()
    def update(self, keys: Tensor, index: Tensor) -> None:
        """As :meth:`iecl_fast.MemoryBank.update`, on every rank. Each key is sent to the rank that holds its entry."""
        check_keys(keys, self.dim)
        check_index(index, len(keys), self.num_items)
        exchange = self._exchange()
        order, sent, received = self._holders(index, exchange)
        keys = exchange.route(keys.to(self.keys.dtype)[order], sent, received)
        index = exchange.route(index.to(torch.int64)[order], sent, received)
        move_entries(self.keys, keys, index - self.start, self.momentum)

    @torch.no_grad()
    def entries(self, index: Tensor) -> Tensor:
        """As :meth:`iecl_fast.MemoryBank.entries`, on every rank, each with its own indices."""
        check_index(index, len(index), self.num_items)
        exchange = self._exchange()
        order, sent, received = self._holders(index, exchange)
        asked = exchange.route(index.to(torch.int64)[order], sent, received)
        rows = exchange.route(self.keys[asked - self.start], received, sent)
        return torch.empty_like(rows).index_copy_(0, order, rows)

    def _exchange(self) -> Exchange:
        exchange = Exchange()
        if (exchange.rank, exchange.size) != self.place:
            raise RuntimeError(
                f"this part of a ShardedMemoryBank was made for rank {self.place[0]} of {self.place[1]}, this is rank "
                f"{exchange.rank} of {exchange.size}; build it anew and load its state_dict"
            )
        return exchange

    def _holders(self, index: Tensor, exchange: Exchange) -> tuple[Tensor, list[int], list[int]]:
        """Indices in the order of the ranks that hold them, and how many go to each rank and come from each."""
        ends = torch.tensor(self.ends, device=index.device)
        holders = torch.searchsorted(ends, index.to(torch.int64), right=True)
        counts = exchange.stack(holders.bincount(minlength=exchange.size))
        return holders.argsort(stable=True), counts[exchange.rank].tolist(), counts[:, exchange.rank].tolist()

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self.keys = fn(self.keys)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        exchange = self._exchange()
        if exchange.size == 1:
            destination[f"{prefix}keys"] = self.keys
            return
        starts = [0, *self.ends[:-1]]
        sizes = [end - start for start, end in zip(starts, self.ends)]
        whole = torch.empty(self.num_items, self.dim, dtype=self.keys.dtype) if exchange.rank == 0 else None
        for first in range(0, max(sizes), ROWS_AT_ONCE):
            counts = [min(max(size - first, 0), ROWS_AT_ONCE) for size in sizes]
            own = counts[exchange.rank]
            to_first = [own, *[0] * (exchange.size - 1)]
            received = counts if whole is not None else [0] * exchange.size
            pieces = exchange.route(self.keys[first : first + own], to_first, received).split(received)
            for start, piece in zip(starts, pieces):
                if whole is not None:
                    whole[start + first : start + first + len(piece)] = piece.cpu()
        if whole is not None:
            destination[f"{prefix}keys"] = whole

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing: list[str], *rest: Any
    ) -> None:
        name = f"{prefix}keys"
        others = {key: value for key, value in state_dict.items() if key != name}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing, *rest)
        errors = rest[-1]
        if name not in state_dict:
            missing.append(name)
        elif state_dict[name].shape != (self.num_items, self.dim):
            shape = tuple(state_dict[name].shape)
            errors.append(f"{name} has the shape {shape}, the whole bank's is {(self.num_items, self.dim)}")
        else:
            self.keys.copy_(state_dict[name][self.start : self.end])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, here={self.start}..{self.end - 1}"
