"""What the holder of some of the keys does by itself for a ring over the keys of all ranks.

On a CPU the C++ kernels of csrc/ring do it, on other devices plain PyTorch. Queries are (N, C) and keys (K, C), at
least one of either; ``exclude`` holds (N,) int64 indices into these keys, -1 for none, or is None.

Order keys are int32 that ascend with the similarity: -0 as 0, NaN of either sign highest.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from iecl_fast import _library
from iecl_fast.ring.reference import similarity

_kernels = torch.ops.iecl_fast

BINS = 64
NAN_KEY = 2**31 - 2
LEAST_MARGIN = 8  # a count of 0 says little about a share
PLAIN_BYTES = 256 * 2**20  # of the similarities that plain PyTorch writes at a time


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cpu


def order_keys(similarities: Tensor) -> Tensor:
    """Of float32 similarities."""
    bits = (similarities + 0.0).view(torch.int32)
    keys = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    return keys.masked_fill_(similarities.isnan(), NAN_KEY)


def sample(query: Tensor, keys: Tensor, size: int) -> Tensor:
    """Similarities with ``size`` of the keys, one from each of as many equal cells: (N, size) float32."""
    if _has_kernels(query):
        return _kernels._ring_shard_sample_cpu(query, keys, size)
    return similarity(query, keys[_sampled(len(keys), size, keys.device)])


def windows(
    query: Tensor, keys: Tensor, exclude: Tensor | None, centers: Tensor, size: int, deviations: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The keys around two boundaries in the order of similarity.

    Args:
        centers: (N, 2) int64, how many keys of the sample lie below a boundary, -1 where none is to be found.
        size: of the sample; 0 takes all keys into each window.
        deviations: standard deviations of such a count from a boundary to its window's ends.

    Returns:
        How many keys lie below each window (N, 2) int64, how many in it (N, 2) int64, and the order keys of those, one
        window after the other, int32.
    """
    if _has_kernels(query):
        return _kernels._ring_shard_windows_cpu(query, keys, exclude, centers, size, deviations)
    parts = []
    sampled = _sampled(len(keys), size, keys.device)
    for rows, similarities, candidates in _plain_rows(query, keys, exclude):
        order = order_keys(similarities)
        below, inside = [], []
        for center in centers[rows].T:
            window = candidates & (center >= 0)[:, None]
            under = torch.zeros_like(window)
            if size > 0:
                share = center.clamp(min=0) / size
                margin = (deviations * (size * share * (1 - share)).sqrt()).ceil().long() + LEAST_MARGIN
                places = order[:, sampled].sort(dim=1, stable=True)
                under = _below(order, places, sampled, center - 1 - margin)
                window = window & ~under & _below(order, places, sampled, center + margin)
            below.append((under & candidates).sum(dim=1))
            inside.append(window)
        both = torch.stack(inside, dim=1)
        listed = order[:, None].expand_as(both)[both]
        parts.append((torch.stack(below, dim=1), both.sum(dim=2), listed))
    below, counts, listed = zip(*parts)
    return torch.cat(below), torch.cat(counts), torch.cat(listed)


def histogram(listed: Tensor, counts: Tensor, low: Tensor, shift: int) -> Tensor:
    """How many of a list's order keys lie in each part of a range.

    Args:
        listed: the order keys of L lists, one list after the other, int32; ``counts`` (L,) of them.
        low: (L, B) int64, where a list's ranges begin. The parts are ``2**shift`` wide.

    Returns:
        (L, B, BINS) int32.
    """
    if _has_kernels(listed):
        return _kernels._ring_order_histogram_cpu(listed, counts, low, shift)
    of_range = []
    lists = torch.arange(len(counts), device=listed.device).repeat_interleave(counts)
    for first in low.T:
        bins = (listed - first[lists]) >> shift
        inside = (bins >= 0) & (bins < BINS)
        numbers = (lists * BINS + bins)[inside]
        of_range.append(torch.bincount(numbers, minlength=len(counts) * BINS).view(-1, BINS))
    return torch.stack(of_range, dim=1).to(torch.int32)


def sums(
    query: Tensor, keys: Tensor, ranks: Tensor, exclude: Tensor | None, temperature: float, with_keys: bool
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the similarities, over T, of the keys with the ranks ``ranks[n, 0] .. ranks[n, 1] - 1``.

    Returns:
        (N,) float64, -inf where there is no such key; and the mean key with these weights (N, C) float32, 0 where there
        is none, or (0, C) without ``with_keys``.
    """
    if _has_kernels(query):
        return _kernels._ring_shard_sums_cpu(query, keys, ranks, exclude, temperature, with_keys)
    logs, means = [], [query.new_empty((0, query.shape[1]), dtype=torch.float32)]
    for rows, similarities, candidates in _plain_rows(query, keys, exclude):
        members = _members(similarities, candidates, ranks[rows])
        logits = (similarities.double() / temperature).masked_fill(~members, -torch.inf)
        logs.append(logits.logsumexp(dim=1))
        if with_keys:
            weights = (logits - logs[-1][:, None]).exp().masked_fill(~members, 0.0)
            means.append(weights.float() @ keys.float())
    return torch.cat(logs), torch.cat(means)


def draw(
    query: Tensor, keys: Tensor, ranks: Tensor, exclude: Tensor | None, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """The keys with the ranks ``ranks[n, 0] .. ranks[n, 1] - 1``, in ascending index, at some positions.

    Args:
        positions: (N, S) int64, less than how many such keys there are, or anything where there are none.

    Returns:
        Similarities (N, S) float32 and indices (N, S) int64; anything where there are none.
    """
    sizes = ranks[:, 1:] - ranks[:, :1]
    if _has_kernels(query):
        uniform = (positions + 0.5) / sizes.clamp(min=1).double()
        return _kernels._ring_shard_draw_cpu(query, keys, ranks, exclude, uniform.contiguous())
    values, indices = [], []
    for rows, similarities, candidates in _plain_rows(query, keys, exclude):
        members_first = (~_members(similarities, candidates, ranks[rows])).to(torch.uint8).argsort(dim=1, stable=True)
        indices.append(members_first.gather(1, positions[rows].clamp(0, len(keys) - 1)))
        values.append(similarities.gather(1, indices[-1]))
    return torch.cat(values), torch.cat(indices)


# ---- plain PyTorch ---------------------------------------------------------------------------------------------------


def _plain_rows(query: Tensor, keys: Tensor, exclude: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some rows at a time: their similarities (n, K) float32, and which keys are candidates."""
    _library.warn_reference("ring.sharded", query.device.type)
    size = max(1, PLAIN_BYTES // (4 * len(keys)))
    columns = torch.arange(len(keys), device=keys.device)
    for first in range(0, len(query), size):
        rows = slice(first, min(first + size, len(query)))
        candidates = torch.ones((rows.stop - first, len(keys)), dtype=torch.bool, device=keys.device)
        if exclude is not None:
            candidates = columns != exclude[rows, None]
        yield rows, similarity(query[rows], keys), candidates


def _members(similarities: Tensor, candidates: Tensor, ranks: Tensor) -> Tensor:
    """(n, K) bool; the excluded are ranked above all candidates."""
    order = order_keys(similarities).masked_fill(~candidates, NAN_KEY + 1)
    rank = order.argsort(dim=1, stable=True).argsort(dim=1)
    return (rank >= ranks[:, :1]) & (rank < ranks[:, 1:])


def _sampled(num_keys: int, size: int, device: torch.device) -> Tensor:
    """Sampled keys, ascending, the same at each call."""
    cells = torch.arange(size + 1) * num_keys // max(size, 1)
    chance = torch.rand(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (cells[:-1] + (chance * (cells[1:] - cells[:-1])).long()).to(device)


def _below(order: Tensor, places: tuple[Tensor, Tensor], sampled: Tensor, rank: Tensor) -> Tensor:
    """Which keys lie below the sampled key of a rank; none for a rank below 0, all for one behind the last."""
    sorted_keys, position = places
    size = len(sampled)
    at = rank.clamp(0, size - 1)[:, None]
    key, index = sorted_keys.gather(1, at), sampled[position.gather(1, at)]
    columns = torch.arange(order.shape[1], device=order.device)
    below = (order < key) | ((order == key) & (columns < index))
    return (below | (rank >= size)[:, None]) & (rank >= 0)[:, None]
