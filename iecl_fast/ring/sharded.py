"""Ring negatives from keys that are spread over ranks: each holds some, for the queries of all.

What is sent is worth a few kilobytes a query, whatever the number of keys: see docs/sharded_bank.md. The functions are
collectives: all ranks call them, each with its own queries, as in DistributedDataParallel.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from iecl_fast.exchange import Exchange
from iecl_fast.ring import functional, shard
from iecl_fast.ring.agreement import local_ranks
from iecl_fast.ring.ops import all_ranks, check_temperature, once_differentiable


def ring_info_nce(
    query: Tensor,
    positive_key: Tensor,
    local_keys: Tensor,
    *,
    lower: float = 0.0,
    upper: float = 100.0,
    temperature: float | Tensor = 0.07,
    exclude: Tensor | None = None,
    reduction: str = "mean",
    group: "dist.ProcessGroup | None" = None,
) -> Tensor:
    """:func:`iecl_fast.ring_info_nce` with the negative keys of all ranks, of which each holds a part.

    The ring is exactly that of one process which holds rank 0's keys, then rank 1's and so on: also where similarities
    are equal, NaN or infinite. Each rank gets the losses of its own queries. DistributedDataParallel averages over the
    ranks, so with batches of one size and ``reduction="mean"`` the gradients are those of one process on the joined
    batch. Nothing is sent in the backward pass. The same inputs give the same bits in every run.

    Args:
        query, positive_key: (N, C), float32, float16 or bfloat16; the ranks may bring different N, also 0.
        local_keys: (K, C), this rank's, same dtype and device; K may differ and be 0. They get no gradient.
        lower, upper, temperature: as in :func:`iecl_fast.ring_info_nce`, the same on all ranks.
        exclude: (N,) int64, as there; indices count the keys of all ranks in rank order.
        reduction: "mean", "sum" or "none", over this rank's queries.
        group: of ``torch.distributed``; None is all ranks. Without an initialised process group this rank is alone.

    Returns:
        float32 scalar, or (N,). Differentiable in query, positive_key and temperature.

    Raises:
        ValueError, TypeError: as there, and if the ranks disagree on what has to be the same.
    """
    local_keys = functional.as_keys(query, local_keys, "local_keys", "KC")
    functional.check_positive(query, positive_key)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction = {reduction!r} is not allowed: 'mean', 'sum' or 'none'")
    number = temperature.item() if isinstance(temperature, Tensor) else temperature
    check_temperature(number)
    if not isinstance(temperature, Tensor):
        temperature = torch.full((), number, dtype=torch.float64, device=query.device)
    inputs = (query, positive_key, temperature)
    wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        joined = _Joined(
            query, local_keys, lower, upper, exclude, Exchange(group), {"temperature": number}, wants_gradient
        )
        log_sums, mean_keys = joined.sums(number)
    loss = _InfoNCE.apply(query, positive_key, temperature, log_sums, mean_keys)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def ring_sample(
    query: Tensor,
    local_keys: Tensor,
    lower: float,
    upper: float,
    *,
    num_samples: int,
    exclude: Tensor | None = None,
    generator: torch.Generator | None = None,
    return_indices: bool = False,
    group: "dist.ProcessGroup | None" = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`iecl_fast.ring_sample` with the keys of all ranks, of which each holds a part: draws from their ring.

    With the generator in the same state the same keys are drawn as by one process that holds all. Similarities are
    sent, not keys; in the backward pass their gradients, and of each rank a sum of its keys. Arguments as there and in
    :func:`ring_info_nce`.

    Returns:
        Similarities (N, num_samples) in query's dtype, differentiable in query. With ``return_indices`` a pair of them
        and of int64 indices of the same shape, which count the keys of all ranks in rank order.
    """
    local_keys = functional.as_keys(query, local_keys, "local_keys", "KC")
    if num_samples < 1:
        raise ValueError(f"num_samples = {num_samples} is not allowed: at least 1")
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        exchange = Exchange(group)
        joined = _Joined(query, local_keys, lower, upper, exclude, exchange, {"num_samples": num_samples}, False)
        shape = (query.shape[0], num_samples)
        uniform = torch.rand(shape, generator=generator, device=query.device, dtype=torch.float64)
        draws = _Draws(joined, uniform)
    similarities = _Sample.apply(query, draws).to(query.dtype)
    return (similarities, draws.indices()) if return_indices else similarities


class _Joined:
    """The queries of all ranks beside this rank's keys, and how its keys lie to their rings.

    Attributes:
        counts, sizes: queries and keys of each rank.
        query: (sum of counts, C), in rank order, as all that follows.
        keys: (K, C), this rank's; ``start`` of all keys come before them.
        exclude: indices into these keys, -1 for none, or None.
        ranks: (sum of counts, 2) int64, of this rank's candidates those that lie in the ring.
        wants_gradient: whether any rank does.
    """

    def __init__(
        self,
        query: Tensor,
        keys: Tensor,
        lower: float,
        upper: float,
        exclude: Tensor | None,
        exchange: Exchange,
        common: dict[str, float],
        wants_gradient: bool,
    ):
        functional.check_keys(query, keys, "local_keys", exclude)
        if keys.requires_grad:
            raise ValueError("local_keys requires a gradient; keys without are allowed, each rank holds but its own")
        self.exchange, self.keys = exchange, keys
        common = {
            "lower": lower,
            "upper": upper,
            "exclude's presence": exclude is not None,
            "query's channels": query.shape[1],
            "query's dtype": functional.DTYPES.index(query.dtype),
            **common,
        }
        self._meet(common, wants_gradient, len(query))
        self.query = exchange.rows(query.detach(), self.counts)
        every = None if exclude is None else exchange.rows(exclude, self.counts)
        num_keys = sum(self.sizes)
        first, end, first_of_rest, end_of_rest = all_ranks(lower, upper, num_keys, every)
        boundaries = torch.tensor([first, end], device=query.device).expand(len(self.query), 2)
        totals = torch.full((len(self.query),), num_keys, device=query.device)
        self.exclude = None
        if every is not None:
            rest = torch.tensor([first_of_rest, end_of_rest], device=query.device)
            boundaries = torch.where(every[:, None] >= 0, rest, boundaries)
            totals = totals - (every >= 0).long()
            here = (every >= self.start) & (every < self.start + len(keys))
            self.exclude = torch.where(here, every - self.start, -1)
        self.ranks = local_ranks(self.query, keys, self.exclude, boundaries.contiguous(), totals, self.sizes, exchange)

    def _meet(self, common: dict[str, float], wants_gradient: bool, count: int) -> None:
        values = [count, len(self.keys), wants_gradient, *common.values()]
        ranks = self.exchange.stack(torch.tensor(values, dtype=torch.float64, device=self.keys.device)).tolist()
        for name, *of_ranks in zip(common, *(rank[3:] for rank in ranks)):
            if len({repr(value) for value in of_ranks}) > 1:
                raise ValueError(f"{name} has to be the same on all ranks, it is {of_ranks}")
        self.counts = [int(rank[0]) for rank in ranks]
        self.sizes = [int(rank[1]) for rank in ranks]
        self.wants_gradient = any(rank[2] for rank in ranks)
        self.start = sum(self.sizes[: self.exchange.rank])

    def to_owners(self, rows: Tensor) -> Tensor:
        """Send each rank what belongs to its queries: (sum of counts, ...) -> (ranks, N, ...)."""
        own, size = self.counts[self.exchange.rank], self.exchange.size
        return self.exchange.route(rows, self.counts, [own] * size).view(size, own, *rows.shape[1:])

    def sums(self, temperature: float) -> tuple[Tensor, Tensor]:
        """For this rank's queries what each rank's part of the ring adds up to.

        Returns:
            Log-sum-exp of the similarities over T (ranks, N) float64, and the mean keys with these weights, float32
            (ranks, N, C), or (ranks, N, 0) if no rank wants a gradient.
        """
        rows, channels = self.query.shape[0], self.query.shape[1] if self.wants_gradient else 0
        if rows == 0 or len(self.keys) == 0:
            log_sums = torch.full((rows,), -torch.inf, dtype=torch.float64, device=self.query.device)
            mean_keys = torch.zeros((rows, channels), device=self.query.device)
        else:
            log_sums, mean_keys = shard.sums(
                self.query, self.keys, self.ranks, self.exclude, temperature, self.wants_gradient
            )
            mean_keys = mean_keys.view(rows, channels)
        # One message: the bits of the float64 numbers as two of float32.
        parts = self.to_owners(torch.cat([log_sums[:, None].view(torch.float32), mean_keys], dim=1))
        return parts[..., :2].contiguous().view(torch.float64)[..., 0], parts[..., 2:]


class _InfoNCE(torch.autograd.Function):
    """Loss of each query, from the sums over the parts of its ring and its positive key."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, positive_key: Tensor, temperature: Tensor, log_sums: Tensor, mean_keys: Tensor
    ) -> Tensor:
        scale = 1.0 / temperature.double().reshape(())
        positive = (query.double() * positive_key.double()).sum(dim=1) * scale
        largest = log_sums.amax(dim=0)  # NaN if any is
        reference = torch.maximum(largest, positive)
        ring = torch.zeros_like(positive)
        weights = []
        for log_sum in log_sums:  # in rank order
            # Nothing at all has no weight, whatever the reference.
            weights.append((log_sum - reference).exp().masked_fill(log_sum == -torch.inf, 0.0))
            ring = ring + weights[-1]
        own = (positive - reference).exp()
        log_all = torch.where(positive >= largest, torch.log1p(ring), torch.log(ring + own))
        value = reference - positive + log_all
        value = value.masked_fill((largest == torch.inf) & (positive < torch.inf), torch.inf)
        loss = torch.where(largest.isnan(), torch.nan, value).float()
        gradient = None
        if any(ctx.needs_input_grad):
            weighted = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
            for weight, mean_key in zip(weights, mean_keys):
                weighted = weighted + weight[:, None] * mean_key
            # (own - all) = -ring, exactly, where own / all - 1 would cancel.
            gradient = (weighted - ring[:, None] * positive_key) / (ring + own)[:, None] * scale
            gradient = gradient.float()
        ctx.save_for_backward(query, temperature, loss, gradient)
        ctx.dtype = positive_key.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, temperature, loss, row_gradient = ctx.saved_tensors
        gradients = [None] * 5
        with torch.no_grad():
            if ctx.needs_input_grad[0]:
                gradients[0] = (gradient[:, None] * row_gradient).to(query.dtype)
            if ctx.needs_input_grad[1]:
                factor = gradient * torch.expm1(-loss) / temperature  # the softmax weight of the positive is exp(-loss)
                gradients[1] = (factor[:, None] * query).to(ctx.dtype)
            if ctx.needs_input_grad[2]:
                slope = (gradient[:, None] * row_gradient * query).sum(dtype=torch.float64)
                gradients[2] = (-slope / temperature).to(temperature.dtype).reshape(temperature.shape)
        return once_differentiable("ring.sharded.ring_info_nce", gradients, gradient, query, temperature)


class _Draws:
    """Draws of this rank's queries from their rings, each answered by the rank that holds the key.

    Flat lists of draws are in the order of (holder, query, draw) where they are asked for, and of (asking rank, query,
    draw) where they are answered.
    """

    def __init__(self, joined: _Joined, uniform: Tensor):
        self.joined = joined
        self.shape = uniform.shape
        members = joined.to_owners(joined.ranks[:, 1] - joined.ranks[:, 0])  # (ranks, N): the holders' shares
        ends = members.cumsum(dim=0)
        positions = (uniform * ends[-1][:, None]).long().minimum(ends[-1][:, None] - 1)
        holders = sum(((positions >= end[:, None]).long() for end in ends), torch.zeros_like(positions))
        positions = positions - (ends - members).T.gather(1, holders)

        flat = holders.flatten()
        self.order = flat.argsort(stable=True)
        self.asked = flat.bincount(minlength=joined.exchange.size).tolist()
        wanted = torch.stack([(holders == rank).sum(dim=1) for rank in range(joined.exchange.size)])
        sent = [len(uniform)] * joined.exchange.size
        wanted = joined.exchange.route(wanted.flatten(), sent, joined.counts)  # (sum of counts,), of this rank
        self.answered = [int(part.sum()) for part in wanted.split(joined.counts)]
        positions = joined.exchange.route(positions.flatten()[self.order].to(torch.int32), self.asked, self.answered)

        # A matrix with a row for each query of all ranks; behind its draws the first of them again and again.
        self.rows = torch.arange(len(wanted), device=wanted.device).repeat_interleave(wanted)
        starts = wanted.cumsum(dim=0) - wanted
        self.columns = torch.arange(len(positions), device=wanted.device) - starts[self.rows]
        self.wanted = wanted
        width = int(wanted.max()) if len(wanted) else 0
        self.similarities = joined.query.new_zeros((len(wanted), width), dtype=torch.float32)
        self.local = torch.zeros((len(wanted), width), dtype=torch.int64, device=wanted.device)
        if width > 0:
            first = positions[starts.clamp(max=len(positions) - 1)].long()
            matrix = first[:, None].repeat(1, width)
            matrix[self.rows, self.columns] = positions.long()
            matrix = matrix.masked_fill(wanted[:, None] == 0, 0)
            self.similarities, local = shard.draw(joined.query, joined.keys, joined.ranks, joined.exclude, matrix)
            self.local = local.masked_fill(wanted[:, None] == 0, 0)

    def answer(self, matrix: Tensor) -> Tensor:
        """What this rank has for each draw of all ranks' queries, to those who asked: (N, num_samples)."""
        values = self.joined.exchange.route(matrix[self.rows, self.columns], self.answered, self.asked)
        return torch.empty_like(values).index_copy_(0, self.order, values).view(self.shape)

    def indices(self) -> Tensor:
        return self.answer(self.local + self.joined.start)

    def query_gradient(self, gradient: Tensor) -> Tensor:
        """From the similarities' gradient (N, num_samples), with rank order in the sum: (N, C) float32."""
        joined = self.joined
        flat = gradient.float().flatten()[self.order]
        matrix = torch.zeros_like(self.similarities)
        matrix[self.rows, self.columns] = joined.exchange.route(flat, self.asked, self.answered)
        parts = torch.zeros(joined.query.shape, device=matrix.device)
        if matrix.numel() > 0:
            # The repetitions share the gradient of the first: with none of it an infinite key would give NaN.
            repeated = torch.arange(matrix.shape[1], device=matrix.device) >= self.wanted[:, None]
            share = matrix[:, :1] / (1 + repeated.sum(dim=1, keepdim=True))
            matrix = torch.where(repeated, share, torch.cat([share, matrix[:, 1:]], dim=1))
            parts = torch.ops.iecl_fast.ring_sample_query_gradient(matrix, self.local, joined.keys)
            parts = parts.masked_fill(self.wanted[:, None] == 0, 0.0)
        total = torch.zeros((len(gradient), parts.shape[1]), dtype=torch.float64, device=parts.device)
        for part in joined.to_owners(parts):
            total = total + part
        return total.float()


class _Sample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, draws: _Draws) -> Tensor:
        ctx.draws = draws
        ctx.save_for_backward(query, draws.joined.keys)  # whose change before the backward pass is an error
        return draws.answer(draws.similarities)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, _ = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            gradients = [ctx.draws.query_gradient(gradient).to(query.dtype), None]
        return once_differentiable("ring.sharded.ring_sample", gradients, gradient, query)
