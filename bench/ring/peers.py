"""Ways to compute a contrastive loss over a ring of negatives, or over all: ours and everyone else's."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from iecl_fast import ring_info_nce, ring_sample
from iecl_fast.ring import ring_ranks

TEMPERATURE = 0.07
DRAWS = 4096


@dataclass(frozen=True)
class Case:
    """One shape, ring, precision, and device, and keys on which selection is easy or hard.

    data: "unit" rows; "constant" keys, which all similarities equal; "infinite", half of the keys; "near" keys, all
    similarities of which share their leading bits; "ties", similarities of a few values.
    precision: "float32", "tf32" (float32 tensors, multiplied as torch.set_float32_matmul_precision("high") has it) or
    "bfloat16".
    """

    n: int = 256
    k: int = 65536
    c: int = 128
    lower: float = 90
    upper: float = 99
    data: str = "unit"
    precision: str = "float32"
    device: str = "cpu"

    def __str__(self) -> str:
        place = "" if self.device == "cpu" else f" {self.precision}"
        return f"N={self.n} K={self.k} C={self.c} {self.lower:g}..{self.upper:g} {self.data}{place}"

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """query (N, C), positive_key (N, C), queue (K, C)."""
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        dtype = torch.bfloat16 if self.precision == "bfloat16" else torch.float32
        return tuple(tensor.to(self.device, dtype) for tensor in self._rows())

    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        query, positive_key, queue = (
            F.normalize(torch.randn(rows, self.c, generator=generator), dim=1) for rows in (self.n, self.n, self.k)
        )
        if self.data == "constant":
            queue[:] = queue[0].clone()
        elif self.data == "infinite":
            queue[torch.rand(self.k, generator=generator) < 0.5] = torch.inf
        elif self.data == "near":
            queue = F.normalize(queue[:1] + 1e-3 * queue, dim=1)
        elif self.data == "ties":
            query, queue = (4 * query).round(), (4 * queue).round()
        return query, positive_key, queue


def plain_moco(query, positive_key, queue, lower, upper):
    """All keys are negatives, as in MoCo's main loop."""
    return _loss(query, positive_key, torch.einsum("nc,kc->nk", query, queue))


def _loss(query, positive_key, negatives):
    """The rest of that loop, with similarities (N, M) to some negatives."""
    positive = torch.einsum("nc,nc->n", query, positive_key).unsqueeze(-1)
    logits = torch.cat([positive, negatives], dim=1) / TEMPERATURE
    return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long, device=query.device))


def sort_and_slice(query, positive_key, queue, lower, upper):
    """The Ring paper's own form: a full descending sort, then a slice."""
    first, end = ring_ranks(lower, upper, len(queue))
    similarities = torch.einsum("nc,kc->nk", query, queue).sort(dim=1, descending=True).values
    return _loss(query, positive_key, similarities[:, len(queue) - end : len(queue) - first])


def topk(query, positive_key, queue, lower, upper):
    """The closest keys down to the lower percentile, without those above the upper one."""
    first, end = ring_ranks(lower, upper, len(queue))
    closest = torch.einsum("nc,kc->nk", query, queue).topk(len(queue) - first, dim=1).values
    return _loss(query, positive_key, closest[:, len(queue) - end :])


def _masked(query, positive_key, similarities, lowest, highest):
    inside = (similarities >= lowest) & (similarities <= highest)
    return _loss(query, positive_key, similarities.masked_fill(~inside, -torch.inf))


def kthvalue(query, positive_key, queue, lower, upper):
    """Two order statistics, then a mask."""
    first, end = ring_ranks(lower, upper, len(queue))
    similarities = torch.einsum("nc,kc->nk", query, queue)
    lowest, highest = (similarities.kthvalue(rank, dim=1, keepdim=True).values for rank in (first + 1, end))
    return _masked(query, positive_key, similarities, lowest, highest)


def quantile(query, positive_key, queue, lower, upper):
    """Two quantiles, a few rows at a time since torch.quantile takes no larger input, then a mask."""
    similarities = torch.einsum("nc,kc->nk", query, queue)
    bounds = similarities.new_tensor([lower / 100, upper / 100])
    edges = [part.quantile(bounds, dim=1) for part in similarities.detach().split(max(1, 2**23 // len(queue)))]
    lowest, highest = torch.cat(edges, dim=1).unsqueeze(-1)
    return _masked(query, positive_key, similarities, lowest, highest)


def ring(query, positive_key, queue, lower, upper):
    return ring_info_nce(query, positive_key, queue, lower=lower, upper=upper, temperature=TEMPERATURE)


def ring_draws(query, positive_key, queue, lower, upper):
    """The paper's memory-bank setting: 4096 draws from the ring."""
    return _loss(query, positive_key, ring_sample(query, queue, lower, upper, num_samples=DRAWS))


def topk_draws(query, positive_key, queue, lower, upper):
    """The closest keys down to the lower percentile, and 4096 draws from those that are not above the upper one."""
    first, end = ring_ranks(lower, upper, len(queue))
    similarities = torch.einsum("nc,kc->nk", query, queue)
    closest = similarities.topk(len(queue) - first, dim=1).values
    draws = torch.randint(len(queue) - end, len(queue) - first, (len(query), DRAWS), device=query.device)
    return _loss(query, positive_key, closest.gather(1, draws))


def with_gradient(loss: Callable, case: Case) -> Callable[[], Tensor]:
    """Forward and backward to the query, ready to be called."""
    query, positive_key, queue = case.tensors()
    query.requires_grad_()

    def run() -> Tensor:
        return torch.autograd.grad(loss(query, positive_key, queue, case.lower, case.upper), query)[0]

    return run


def matmul(case: Case) -> Callable[[], Tensor]:
    """The product alone: what no form can do without, unless it never writes it."""
    query, _, queue = case.tensors()
    return lambda: torch.mm(query, queue.T)


def sample(case: Case) -> Callable[[], Tensor]:
    query, _, queue = case.tensors()
    return lambda: ring_sample(query, queue, case.lower, case.upper)


# Selecting forms; each also compiled.
SELECTING = {"sort and slice": sort_and_slice, "topk": topk, "kthvalue": kthvalue, "quantile": quantile}


def compiled(loss: Callable) -> Callable:
    return torch.compile(loss, mode="max-autotune", dynamic=False)
