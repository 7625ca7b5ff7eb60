"""MoCo (He et al. 2020; v2: Chen et al. 2020), its negatives optionally the Ring of Wu et al. 2021."""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from iecl_fast.memory import MemoryQueue, gather_rows
from iecl_fast.ring import RingSchedule, ring_info_nce
from iecl_fast.ssl.encoders import Encoder, ProjectionHead
from iecl_fast.ssl.momentum import MomentumEncoder


class MoCo(nn.Module):
    """Momentum Contrast: one view's embedding has to find the other view's among a queue of earlier keys.

    The paper's settings: v1 is ``head="linear", temperature=0.07``, v2 ``head="mlp", temperature=0.2``. As in the
    original nothing keeps an image's own keys of the last epoch out of the queue, so ``num_keys`` should be well below
    the number of images.

    One training step::

        losses = method(views, index)
        sum(losses.values()).backward()
        optimizer.step()
        method.after_step()

    Several forward passes may precede one ``after_step`` (gradient accumulation); it enqueues the keys of all of them.

    On one process BatchNorm of the key branch sees its batch as it is. Under ``torch.distributed`` the key batch is
    shuffled over the ranks before the key encoder and back after it, so that the batch statistics do not tell the
    positive (He et al. 2020, section 3.3); networks without BatchNorm, or with SyncBatchNorm, need none of it. Ranks
    that build the method with the same seed hold the same queue ever after, so DDP need not broadcast buffers.

    Args:
        backbone: the network to be trained, (N, 3, H, W) -> (N, ``backbone.feature_dim``).
        dim: width C of the embedding.
        num_keys: rows K of the queue.
        momentum: of the key encoder.
        temperature: of the softmax.
        head: ``"linear"`` or ``"mlp"``.
        symmetric: each view is the query once and the key once; the loss is the mean of the two halves.
        ring: percentiles of the queue, by ascending similarity, that are negatives; None takes the whole queue.

    Attributes:
        num_views: 2.
        queue: the :class:`iecl_fast.MemoryQueue` of the key encoder's embeddings.
        step: int64 scalar buffer, calls of ``after_step`` so far. It drives ``ring`` and resumes with the state_dict.
    """

    num_views = 2
    step: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: int = 128,
        num_keys: int = 65536,
        momentum: float = 0.999,
        temperature: float = 0.07,
        head: Literal["linear", "mlp"] = "mlp",
        symmetric: bool = False,
        ring: RingSchedule | None = None,
    ):
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.encoder = Encoder(backbone, ProjectionHead(backbone.feature_dim, dim, head))
        self.key_encoder = MomentumEncoder(self.encoder, momentum)
        self.queue = MemoryQueue(num_keys, dim)
        self.temperature = temperature
        self.symmetric = symmetric
        self.ring = ring
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self._pending: list[Tensor] = []  # keys of the forward passes since the last after_step
        self._positive_similarity = torch.tensor(torch.nan)

    @property
    def backbone(self) -> nn.Module:
        """The trained branch's backbone, which evaluation uses."""
        return self.encoder.backbone

    def forward(self, views: list[Tensor], index: Tensor | None = None) -> dict[str, Tensor]:
        """The losses of one batch.

        Args:
            views: two tensors (N, 3, H, W); the first holds the queries, the second the keys.
            index: (N,) int64, the images' places in the dataset. Methods with a memory bank need it, MoCo does not.

        Returns:
            ``{"contrast": loss}``, a float32 scalar.
        """
        if len(views) != self.num_views:
            raise ValueError(f"views must be a list of {self.num_views} tensors, got {len(views)}")
        # The percentiles are Python numbers that change with the step: a compiled forward leaves them to eager mode.
        contrast = self._contrast if self.ring is None else torch.compiler.disable(self._contrast)
        first, second = views
        keys = [self._encode_keys(second)]
        loss = contrast(self.encoder(first), keys[0])
        if self.symmetric:
            keys.append(self._encode_keys(first))
            loss = (loss + contrast(self.encoder(second), keys[1])) / 2
        if self.training:
            self._pending.extend(keys)  # not enqueued before both halves are done: no view meets itself
        return {"contrast": loss}

    def after_step(self) -> None:
        """Move the key encoder, enqueue the keys and count the step. Call it after ``optimizer.step()``, on every rank.

        The original moves the key encoder at the start of the next step, which comes to the same.
        """
        self.key_encoder.update(self.encoder)
        if self._pending:
            self.queue.enqueue(torch.cat(self._pending))
            self._pending.clear()
        self.step += 1

    def percentiles(self) -> tuple[float, float]:
        """Lower and upper percentile of the negatives at the current step."""
        return (0.0, 100.0) if self.ring is None else self.ring(int(self.step))

    def diagnostics(self) -> dict[str, float]:
        """Figures of the last forward pass for the log. Reads device memory, so it synchronises."""
        lower, upper = self.percentiles()
        return {
            "ring_lower": float(lower),
            "ring_upper": float(upper),
            "queue_filled": float(self.queue.filled),
            "positive_similarity": float(self._positive_similarity),
        }

    def _contrast(self, queries: Tensor, keys: Tensor) -> Tensor:
        lower, upper = self.percentiles()
        with torch.autocast(queries.device.type, enabled=False):
            self._positive_similarity = (queries.detach() * keys).sum(dim=1).mean()
            return ring_info_nce(queries, keys, self.queue.keys, lower=lower, upper=upper, temperature=self.temperature)

    @torch.no_grad()
    def _encode_keys(self, images: Tensor) -> Tensor:
        if not self._shuffles():
            return self.key_encoder(images)
        rank, sizes = dist.get_rank(), _batch_sizes(images)
        bounds = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        # Seeded by the step: all ranks draw the same permutation without talking, and so does a resumed run.
        order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(int(self.step))).to(images.device)
        keys = gather_rows(self.key_encoder(gather_rows(images)[order[bounds]]))
        return keys[torch.argsort(order)[bounds]]

    def _shuffles(self) -> bool:
        """Whether BatchNorm statistics of a rank's own batch could tell the positive."""
        if not (self.training and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return False
        norms = [module for module in self.key_encoder.modules() if isinstance(module, _BatchNorm)]
        return not all(isinstance(norm, nn.SyncBatchNorm) for norm in norms)


def _batch_sizes(images: Tensor) -> list[int]:
    """Number of images on each rank."""
    return gather_rows(torch.tensor([len(images)], device=images.device)).tolist()
