"""How the holders of parts of the keys find the boundaries of a ring over all of them, without sending keys.

A boundary of rank r has r keys of all ranks below it, in the order of (similarity, global key index), where a process
holds the indices behind those of the processes of lower rank. What each process has to know is how many of *its* keys
lie below: these are then its own first keys in the same order. So nothing but counts is exchanged:

1. Each holder takes a small sample of its keys. The ranks find the boundaries among all sampled keys, and with them
   how many sampled keys of each holder lie below.
2. Around that place in its own order each holder opens a window, some per cent of its keys, and counts those below. The
   ranks find the boundaries among the keys in all windows. Where each holder has a key of its window on both sides of
   the boundary, or no key beyond, it knows how many of all its keys lie below; the count is exact, and proved.
3. The few queries for which the sample was no good guide come again with wider windows, in the end with all keys.

A boundary among lists that are spread over ranks is found digit by digit of its order key, from histograms of
:data:`iecl_fast.ring.shard.BINS` bins, at most six of them; equal keys are then shared out in the order of the ranks.
"""

import torch
from torch import Tensor

from iecl_fast.exchange import Exchange
from iecl_fast.ring import shard

UNSAMPLED = 4096  # a holder of so few keys lists them all
DIGITS = (30, 24, 18, 12, 6, 0)  # shifts, of 6 bits each from the top
DEVIATIONS = (4.0, 16.0)  # of the windows; then all keys
LISTED = 12 * 2**20  # keys in the windows of queries that are done together, about, on the holder of the most keys


def sample_size(num_keys: int) -> int:
    """Sampled keys of all holders: balances what sampling costs against the windows, which narrow with its root."""
    return int(1.8 * num_keys ** (2 / 3))


def rows_together(sizes: list[int], sampled: bool) -> int:
    """How many queries to do together, at most 256, on all ranks the same."""
    largest, total = max(sizes), sum(sizes)
    size = sample_size(total) * largest // total if sampled else 0
    listed = 2 * largest * (min(1.0, DEVIATIONS[0] * size**-0.5 + 16 / size) if size else 1.0)
    return min(256, max(1, int(LISTED / max(listed, 1))))


def local_ranks(
    query: Tensor,
    keys: Tensor,
    exclude: Tensor | None,
    boundaries: Tensor,
    totals: Tensor,
    sizes: list[int],
    exchange: Exchange,
) -> Tensor:
    """How many of this rank's candidates lie below each query's two boundaries.

    A collective: queries, boundaries, totals and sizes are the same on all ranks.

    Args:
        query: (N, C). keys: (K, C), this rank's. exclude: (N,) int64 index into these, -1 for none, or None.
        boundaries: (N, 2) int64, ranks among all candidates of all ranks, of which there are ``totals`` (N,) int64.
        sizes: keys of each rank.

    Returns:
        (N, 2) int64.
    """
    own = torch.full_like(totals, len(keys))  # candidates here
    if exclude is not None:
        own -= (exclude >= 0).long()
    open_ = (boundaries > 0) & (boundaries < totals[:, None])
    result = torch.where(boundaries > 0, own[:, None], 0)  # right where nothing has to be found
    rows = open_.any(dim=1).nonzero()[:, 0]
    attempts = [*DEVIATIONS, None] if max(sizes) > UNSAMPLED else [None]
    for deviations in attempts:
        if len(rows) == 0:
            break
        size = rows_together(sizes, deviations is not None)
        missed = []
        for some in rows.split(size):
            part = _Part(query[some], keys, None if exclude is None else exclude[some], own[some])
            found, sure = _attempt(part, boundaries[some], totals[some], open_[some], deviations, sizes, exchange)
            result[some] = torch.where(open_[some], found, result[some])
            missed.append(some[~sure])
        rows = torch.cat(missed)
    return result


class _Part:
    """Some queries and this rank's keys: how many of them are candidates is ``own`` (n,)."""

    def __init__(self, query: Tensor, keys: Tensor, exclude: Tensor | None, own: Tensor):
        self.query, self.keys, self.exclude, self.own = query, keys, exclude, own

    def sample(self, size: int) -> tuple[Tensor, Tensor]:
        """Order keys of the sample, query by query, and how many for each."""
        rows = len(self.query)
        counts = torch.full((rows,), size, device=self.query.device)
        if size == 0:
            return counts.new_empty(0, dtype=torch.int32), counts
        return shard.order_keys(shard.sample(self.query, self.keys, size)).flatten(), counts

    def windows(self, centers: Tensor, size: int, deviations: float) -> tuple[Tensor, Tensor, Tensor]:
        if len(self.keys) == 0:
            nothing = torch.zeros_like(centers)
            return nothing, nothing, nothing.new_empty(0, dtype=torch.int32)
        return shard.windows(self.query, self.keys, self.exclude, centers, size, deviations)


def _attempt(
    part: _Part,
    boundaries: Tensor,
    totals: Tensor,
    open_: Tensor,
    deviations: float | None,
    sizes: list[int],
    exchange: Exchange,
) -> tuple[Tensor, Tensor]:
    """Local counts below the boundaries (n, 2), and for which queries they are proved on all ranks (n,) bool."""
    size = 0
    centers = torch.zeros_like(boundaries)
    if deviations is not None:
        num_keys = sum(sizes)
        samples = [-(-sample_size(num_keys) * count // num_keys) for count in sizes]
        mine = samples[exchange.rank]
        listed, counts = part.sample(mine)
        places = (boundaries * sum(samples)).div(totals[:, None], rounding_mode="floor")
        below = split(listed, counts, places, exchange)
        if len(part.keys) > UNSAMPLED:
            size, centers = mine, below
    centers = centers.masked_fill(~open_, -1)
    below, counts, listed = part.windows(centers, size, deviations or 0.0)

    wanted = boundaries - exchange.total(below)
    inside = exchange.total(counts)
    missed = (wanted < 0) | (wanted > inside)
    found = split(listed, counts.flatten(), wanted.clamp(min=0).minimum(inside).flatten()[:, None], exchange)
    found = found.view_as(counts)
    # With no key of the window on one side the boundary may lie anywhere there, unless there are no keys at all.
    missed = missed | ((found == 0) & (below > 0)) | ((found == counts) & (below + counts < part.own[:, None]))
    missed = exchange.total((missed & open_).any(dim=1).to(torch.int32))
    return below + found, missed == 0


def split(listed: Tensor, counts: Tensor, wanted: Tensor, exchange: Exchange) -> Tensor:
    """Share out the lowest entries of lists that are spread over ranks.

    Entries ascend by (order key, rank of the holder, position in the holder's list).

    Args:
        listed: order keys of L lists, one list after the other, int32; ``counts`` (L,) of them here.
        wanted: (L, B) int64, how many entries of all ranks' lists to take, the same on all ranks, from none to all.

    Returns:
        (L, B) int64, how many of the lowest are this rank's.
    """
    mine = torch.zeros_like(wanted)
    low = torch.full_like(wanted, -(2**31))
    left = wanted  # to be taken from what lies in the range that begins at low
    for shift in DIGITS:
        own = shard.histogram(listed, counts, low, shift)
        upto = exchange.total(own).long().cumsum(dim=2)
        own = own.long()
        # The bin of the first entry that is not taken; behind the last bin if all are.
        bins = (upto <= left[..., None]).sum(dim=2)
        before = bins[..., None] - 1
        mine += own.cumsum(dim=2).gather(2, before.clamp(min=0))[..., 0].masked_fill(bins == 0, 0)
        left = left - upto.gather(2, before.clamp(min=0))[..., 0].masked_fill(bins == 0, 0)
        whole = bins == shard.BINS
        at = bins.clamp(max=shard.BINS - 1)[..., None]
        equal = own.gather(2, at)[..., 0].masked_fill(whole, 0)
        left = left.masked_fill(whole, 0)
        low = low + (bins.clamp(max=shard.BINS - 1) << shift)
        if bool((left == 0).all()):  # nothing more is to be taken from these bins
            return mine
    everyone = exchange.stack(equal.to(torch.int32)).long()
    earlier = everyone[: exchange.rank].sum(dim=0)
    return mine + (left - earlier).clamp(min=0).minimum(equal)
