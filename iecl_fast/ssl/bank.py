"""A memory bank as the other side of a contrastive loss: what instance discrimination and CMC have in common."""

import math

import torch
from torch import Tensor, nn

from iecl_fast.memory import MemoryBank, gather_rows
from iecl_fast.memory_sharded import ShardedMemoryBank
from iecl_fast.ring import ring_sample, sharded
from iecl_fast.ring.ops import check_temperature
from iecl_fast.ssl.encoders import check_counts

LOSSES = ("softmax", "nce")
NORMALIZER_MOMENTUM = 0.9


def _log_mean(logs: Tensor) -> Tensor:
    """log of the mean of exp over a vector: (N,) -> scalar."""
    return logs.logsumexp(dim=0) - math.log(len(logs))


@torch.compiler.disable
def _sample_of_shards(
    queries: Tensor, keys: Tensor, lower: float | Tensor, upper: float | Tensor, *, num_samples: int, exclude: Tensor
) -> Tensor:
    return sharded.ring_sample(queries, keys, float(lower), float(upper), num_samples=num_samples, exclude=exclude)


class BankContrast(nn.Module):
    """Queries have to find their own image's entry in a bank among entries drawn from the ring around them.

    Of n candidates, all entries but the query's own, ``num_samples`` = m are drawn with replacement from those between
    two percentiles of similarity (Wu et al. 2021). With the logits s / T of the own entry and of the draws, the loss is

    * ``"softmax"``: the cross entropy of the own entry among the m + 1;
    * ``"nce"``: noise-contrastive estimation as in Wu et al. 2018, eq. 6 to 8: the logistic loss of telling the own
      entry from m draws of noise, with P(i|v) = exp(s / T) / Z. Noise is uniform over the ring, and Z its size times
      the mean of exp(s / T) over draws, a running mean over the batches; so the size cancels out. In the first step
      the mean is the batch's own.

    Args:
        num_images, dim, momentum: of the :class:`iecl_fast.MemoryBank`.
        temperature: T > 0.
        num_samples: m >= 1.
        loss: ``"softmax"`` or ``"nce"``.
        sharded: each rank holds a part of the bank, a :class:`iecl_fast.memory_sharded.ShardedMemoryBank`. The forward
            pass, the backward pass and state_dict are then collectives.

    Attributes:
        log_normalizer: float32 scalar, log of the running mean; NaN before the first step. Only with ``"nce"``.
    """

    log_normalizer: Tensor

    def __init__(
        self,
        num_images: int,
        dim: int,
        *,
        momentum: float,
        temperature: float,
        num_samples: int,
        loss: str,
        sharded: bool,
    ):
        super().__init__()
        check_temperature(temperature)
        if num_images < 2:
            raise ValueError(f"num_images must be at least 2, for a negative beside the own entry, got {num_images}")
        check_counts(num_samples=num_samples)
        if loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {loss!r}")
        self.sharded = sharded
        self.bank = (ShardedMemoryBank if sharded else MemoryBank)(num_images, dim, momentum)
        self.temperature = temperature
        self.num_samples = num_samples
        self.loss = loss
        if loss == "nce":
            self.register_buffer("log_normalizer", torch.tensor(torch.nan))
        self._pending: list[tuple[Tensor, Tensor]] = []  # keys and index of the forward passes since after_step
        self._pending_logs: list[Tensor] = []
        self.positive_similarity = torch.tensor(torch.nan)

    def forward(self, queries: Tensor, index: Tensor, percentiles: tuple[float | Tensor, ...]) -> Tensor:
        """The mean loss of unit queries (N, C) whose images' entries are ``index`` (N,), int64: a float32 scalar."""
        with torch.autocast(queries.device.type, enabled=False):
            positives = (queries * self.bank.entries(index)).sum(dim=1, keepdim=True)
            sample = _sample_of_shards if self.sharded else ring_sample
            keys = self.bank.keys.to(queries.dtype)  # they differ in a method that was made float16 or float64
            draws = sample(queries, keys, *percentiles, num_samples=self.num_samples, exclude=index)
            self.positive_similarity = positives.detach().mean()
            positives, draws = positives / self.temperature, draws / self.temperature
            if self.loss == "nce":
                return self._nce(positives, draws)
            return (torch.cat([positives, draws], dim=1).logsumexp(dim=1) - positives[:, 0]).mean()

    def _nce(self, positives: Tensor, draws: Tensor) -> Tensor:
        logs = draws.detach().logsumexp(dim=1) - math.log(self.num_samples)
        if self.training:
            logs = gather_rows(logs)
            self._pending_logs.append(logs)
        normalizer = torch.where(self.log_normalizer.isnan(), _log_mean(logs), self.log_normalizer)
        shift = normalizer + math.log(self.num_samples)
        own = nn.functional.logsigmoid(positives[:, 0] - shift)
        noise = nn.functional.logsigmoid(shift - draws).sum(dim=1)
        return -(own + noise).mean()

    def remember(self, keys: Tensor, index: Tensor) -> None:
        """Keep a batch's keys (N, C) for :meth:`after_step`."""
        self._pending.append((keys.detach(), index))

    def skip_step(self) -> None:
        """Forget all that was remembered since the last call."""
        self._pending.clear()
        self._pending_logs.clear()

    def after_step(self) -> None:
        """Move the entries of all that was remembered since the last call. On every rank."""
        if self._pending:
            keys, index = (torch.cat(parts) for parts in zip(*self._pending, strict=True))
            self.bank.update(keys, index)
            self._pending.clear()
        if self._pending_logs:
            log_mean = _log_mean(torch.cat(self._pending_logs))
            moved = torch.logaddexp(
                self.log_normalizer + math.log(NORMALIZER_MOMENTUM), log_mean + math.log(1 - NORMALIZER_MOMENTUM)
            )
            self.log_normalizer.copy_(torch.where(self.log_normalizer.isnan(), log_mean, moved))
            self._pending_logs.clear()


def check_places(index: Tensor | None, count: int) -> None:
    """Refuse what are no places in the data set: int64, one for each of so many images.

    Raises:
        ValueError: no index, or another number of them.
        TypeError: it is no int64 tensor.
    """
    if index is None:
        raise ValueError("index must hold each image's place in the data set, got None: the memory bank needs it")
    if not isinstance(index, Tensor) or index.dtype != torch.int64:
        what = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(f"index must be an int64 tensor, got {what}")
    if index.shape != (count,):
        raise ValueError(f"index must have shape ({count},), one for each image, got {tuple(index.shape)}")
