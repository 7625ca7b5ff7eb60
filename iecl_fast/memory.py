"""Stores of keys from earlier steps, from which contrastive methods take their negatives."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from iecl_fast.exchange import world_size


@torch.no_grad()
def gather_rows(rows: Tensor) -> Tensor:
    """Concatenate the rows of all ranks along dimension 0, in rank order.

    Every rank gets the same result. Without an initialised process group, or in a group of one, it is ``rows`` itself,
    detached. The ranks may bring different numbers of rows (a short last batch), also none; the other dimensions and
    the dtype must agree. No gradient flows through.
    """
    rows = rows.detach()
    ranks = world_size()
    if ranks == 1:
        return rows
    size = torch.tensor([len(rows)], device=rows.device)
    sizes = [torch.empty_like(size) for _ in range(ranks)]
    dist.all_gather(sizes, size)
    sizes = torch.cat(sizes).tolist()
    # Collectives need equal shapes: pad to the longest and cut what was padded.
    longest = rows.new_zeros(max(sizes), *rows.shape[1:])
    longest[: len(rows)] = rows
    parts = [torch.empty_like(longest) for _ in sizes]
    dist.all_gather(parts, longest)
    return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])


class MemoryQueue(nn.Module):
    """The last ``num_keys`` keys, first in, first out: MoCo's queue (He et al. 2020, "Momentum Contrast", section 3.2).

    Every batch size fits: a batch that crosses the end of the storage wraps, one that is longer than the queue leaves
    its last ``num_keys`` rows, and nothing is dropped or reordered. Under ``torch.distributed`` each rank's keys are
    gathered in rank order, so all ranks hold the same queue; alone it works without a process group.

    All state is in buffers and so in ``state_dict``: a resumed run continues where it stopped, on any number of ranks.
    Keys are stored as they come; whoever compares by cosine enqueues unit rows.

    Args:
        num_keys: rows K of the queue.
        dim: width C of a key.
        with_ids: keep an integer beside each key (its image's index in the dataset).

    Attributes:
        keys: (K, C) float32. Random unit rows until they are overwritten, as in the original.
        pointer: int64 scalar, the row that the next key goes to; once the queue is full it is the oldest key's row.
        filled: int64 scalar, how many rows hold enqueued keys, at most K.
        ids: (K,) int64, -1 where no id was given; only with ``with_ids``.
    """

    keys: Tensor
    pointer: Tensor
    filled: Tensor
    ids: Tensor

    def __init__(self, num_keys: int, dim: int, *, with_ids: bool = False):
        super().__init__()
        for name, value in (("num_keys", num_keys), ("dim", dim)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.num_keys = num_keys
        self.dim = dim
        self.with_ids = with_ids
        self.register_buffer("keys", F.normalize(torch.randn(num_keys, dim), dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))
        if with_ids:
            self.register_buffer("ids", torch.full((num_keys,), -1))

    @torch.no_grad()
    def enqueue(self, keys: Tensor, ids: Tensor | None = None) -> None:
        """Store a batch in place of the oldest keys.

        Call it once a step and after the loss, on every rank: it is a collective under ``torch.distributed``.

        Args:
            keys: (N, C), floating point, any N. Converted to the queue's dtype; no gradient is kept.
            ids: (N,), integers; required by a queue with ids and refused by one without.

        Raises:
            ValueError: a shape does not fit, or ids are missing or unexpected.
            TypeError: keys are not floating point, or ids not integers.
        """
        self._check(keys, ids)
        rows = gather_rows(keys.to(self.keys.dtype))
        skipped = max(0, len(rows) - self.num_keys)  # rows that a batch longer than the queue overwrites itself
        # Positions are computed on the device: no synchronisation.
        positions = (self.pointer + torch.arange(skipped, len(rows), device=rows.device)) % self.num_keys
        self.keys.index_copy_(0, positions, rows[skipped:])
        if ids is not None:
            self.ids.index_copy_(0, positions, gather_rows(ids.to(torch.int64))[skipped:])
        self.pointer.add_(len(rows)).remainder_(self.num_keys)
        self.filled.add_(len(rows)).clamp_(max=self.num_keys)

    @torch.no_grad()
    def rows_of(self, ids: Tensor) -> Tensor:
        """Rows of the newest keys with these ids, as :func:`iecl_fast.ring_info_nce` takes them for ``exclude``.

        Args:
            ids: (N,), integers, on the queue's device; only for a queue with ids.

        Returns:
            (N,) int64, indices into ``keys``; -1 where the queue holds no key with that id, and for -1, which is no id.

        Raises:
            ValueError: the queue is one without ids, or the shape does not fit.
            TypeError: ids are not integers.
        """
        if not self.with_ids:
            raise ValueError("a MemoryQueue built with with_ids=False knows no ids")
        _check_integers(ids, "ids", len(ids))
        by_age = (self.pointer + torch.arange(self.num_keys, device=ids.device)) % self.num_keys  # oldest first
        known, order = torch.sort(self.ids[by_age], stable=True)
        last = (torch.searchsorted(known, ids.to(known.dtype), right=True) - 1).clamp_(min=0)
        return torch.where((known[last] == ids) & (ids != -1), by_age[order[last]], -1)

    def _check(self, keys: Tensor, ids: Tensor | None) -> None:
        check_keys(keys, self.dim)
        if (ids is not None) != self.with_ids:
            wanted = "needs ids beside the keys" if self.with_ids else "takes no ids"
            raise ValueError(f"a MemoryQueue built with with_ids={self.with_ids} {wanted}")
        if ids is not None:
            _check_integers(ids, "ids", len(keys))

    def extra_repr(self) -> str:
        return f"num_keys={self.num_keys}, dim={self.dim}, with_ids={self.with_ids}"


class Bank(nn.Module):
    """What memory banks have in common: a key of width ``dim`` for each item, and how far an update moves it.

    Raises:
        ValueError: a size below 1, or a momentum outside 0..1.
    """

    keys: Tensor

    def __init__(self, num_items: int, dim: int, momentum: float):
        super().__init__()
        for name, value in (("num_items", num_items), ("dim", dim)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0.0 <= momentum <= 1.0:
            raise ValueError(f"momentum must lie in 0..1, got {momentum}")
        self.num_items = num_items
        self.dim = dim
        self.momentum = momentum

    def extra_repr(self) -> str:
        return f"num_items={self.num_items}, dim={self.dim}, momentum={self.momentum}"


class MemoryBank(Bank):
    """One key for each image of a training set, moved a little whenever the image is seen (Wu et al. 2018,
    "Unsupervised Feature Learning via Non-Parametric Instance Discrimination", section 3).

    Under ``torch.distributed`` each rank's keys are gathered in rank order, so all ranks hold the same bank; alone it
    works without a process group. All state is in a buffer and so in ``state_dict``.

    Args:
        num_items: images K of the training set.
        dim: width C of a key.
        momentum: weight of the old key in each update, 0 <= momentum <= 1; the original's is 0.5.

    Attributes:
        keys: (K, C) float32, unit rows from the start; random until their images are seen.
    """

    def __init__(self, num_items: int, dim: int, momentum: float = 0.5):
        super().__init__(num_items, dim, momentum)
        self.register_buffer("keys", F.normalize(torch.randn(num_items, dim), dim=1))

    @torch.no_grad()
    def update(self, keys: Tensor, index: Tensor) -> None:
        """Move the entries of a batch: ``entry = unit(momentum * entry + (1 - momentum) * key)``.

        An index that comes more than once takes its last key, counted in rank order, and moves once. Where the mixture
        has no direction, as between opposite keys or where one is not finite, the entry stays as it was. Call it once a
        step and after the loss, on every rank: it is a collective under ``torch.distributed``.

        Args:
            keys: (N, C), floating point, any N. Converted to the bank's dtype; no gradient is kept.
            index: (N,), integers in 0 .. K - 1, on the bank's device: which entries.

        Raises:
            ValueError: a shape does not fit, or an index lies outside the bank (on a GPU the device says so itself).
            TypeError: keys are not floating point, or the index not integers.
        """
        check_keys(keys, self.dim)
        check_index(index, len(keys), self.num_items)
        keys = gather_rows(keys.to(self.keys.dtype))
        move_entries(self.keys, keys, gather_rows(index.to(torch.int64)), self.momentum)

    def entries(self, index: Tensor) -> Tensor:
        """The keys of some images: (N,) integers in 0 .. K - 1 -> (N, C).

        Raises:
            ValueError, TypeError: as :meth:`update`.
        """
        check_index(index, len(index), self.num_items)
        return self.keys[index]


def move_entries(entries: Tensor, keys: Tensor, index: Tensor, momentum: float) -> None:
    """Move the rows ``index`` of a bank's entries (K, C) towards keys (N, C), in place; see MemoryBank.update."""
    # All occurrences of an index write what the last of them does, so that the order of writing does not matter.
    known, order = torch.sort(index, stable=True)
    last = order[torch.searchsorted(known, index, right=True) - 1]
    old = entries[index]
    mixture = momentum * old + (1 - momentum) * keys[last]
    norms = torch.linalg.vector_norm(mixture, dim=1, keepdim=True)
    has_direction = (norms > 1e-12) & (norms < torch.inf)
    entries.index_copy_(0, index, torch.where(has_direction, mixture / norms, old))


def check_index(index: Tensor, count: int, num_items: int) -> None:
    """ValueError or TypeError unless index is (count,) integers in 0..num_items - 1."""
    _check_integers(index, "index", count)
    if torch.compiler.is_compiling():  # the graph looks when it runs
        inside = ((index >= 0) & (index < num_items)).all()
        torch._assert_async(inside, f"index must lie in 0..{num_items - 1}")
        return
    # A GPU's indices are not read: that would wait for it, and its own indexing checks them.
    if index.device.type == "cpu" and index.numel() and not 0 <= index.min() <= index.max() < num_items:
        wrong = index[(index < 0) | (index >= num_items)][0]
        raise ValueError(f"index must lie in 0..{num_items - 1}, got {int(wrong)}")


def check_keys(keys: Tensor, dim: int) -> None:
    """ValueError or TypeError unless keys are (N, dim), floating point."""
    if keys.ndim != 2 or keys.shape[1] != dim:
        raise ValueError(f"keys must have shape (N, {dim}), got {tuple(keys.shape)}")
    if not keys.is_floating_point():
        raise TypeError(f"keys must be floating point, got {keys.dtype}")


def _check_integers(numbers: Tensor, name: str, count: int) -> None:
    if numbers.shape != (count,):
        raise ValueError(f"{name} must have shape ({count},), one for each key, got {tuple(numbers.shape)}")
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise TypeError(f"{name} must be integers, got {numbers.dtype}")
