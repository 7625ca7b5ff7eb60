"""MoCo (He et al. 2020; v2: Chen et al. 2020), with Ring negatives, SAIB and spectral normalisation as arguments."""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from iecl_fast.exchange import world_size
from iecl_fast.memory import MemoryQueue, gather_rows
from iecl_fast.ring import RingSchedule, ring_info_nce
from iecl_fast.ring.ops import check_temperature
from iecl_fast.ssl.encoders import Encoder, ProjectionHead
from iecl_fast.ssl.gather import batch_sizes
from iecl_fast.ssl.method import Method
from iecl_fast.ssl.momentum import MomentumEncoder


class MoCo(Method):
    """Momentum Contrast: one view's embedding has to find the other view's among a queue of earlier keys.

    The paper's settings: v1 is ``head="linear", temperature=0.07``, v2 ``head="mlp", temperature=0.2``. As in the
    original nothing keeps an image's own keys of the last epoch out of the queue, so ``num_keys`` should be well below
    the number of images.

    Several forward passes may precede one ``after_step`` (gradient accumulation); it enqueues the keys of all of them.

    Under ``torch.distributed`` the key batch is shuffled over the ranks before the key encoder and back after it, so
    that a query and its key are not normalised by the statistics of the same images (He et al. 2020, section 3.3). On
    one process there is nobody to shuffle with: BatchNorm of the key branch sees its batch as it is. Networks without
    BatchNorm need no shuffling, and in a key encoder with SyncBatchNorm it would change nothing;
    :func:`~iecl_fast.ssl.batch_norm.sync_batch_norm` leaves that one as it is. Ranks that build the method with the
    same seed hold the same queue ever after, so DDP need not broadcast buffers.

    With ``saib`` the keys' view is transformed, and the keys are made of it without gradient, as in IE-CL. The block
    learns from the entropy of the trained encoder's embeddings of that view, which costs one more pass through it.

    Args:
        backbone: the network to be trained, (N, 3, H, W) -> (N, ``backbone.feature_dim``).
        dim: width C of the embedding.
        num_keys: rows K of the queue.
        momentum: of the key encoder.
        temperature: of the softmax.
        head: ``"linear"``, ``"mlp"`` or ``"mlp3"``, see :class:`~iecl_fast.ssl.ProjectionHead`.
        hidden_dim: units of the head's hidden layers; None takes the backbone's width.
        symmetric: each view is the query once and the key once; the loss is the mean of the two halves.
        spectral: normalise every convolution of both encoders by :func:`iecl_fast.spectral_norm`.
        entropy_weight: of the entropy that ``saib`` learns from; without the block there is no such term. 0 leaves the
            block as it was initialised.
        saib_weight_decay, terms_interval, jacobian_steps: see :class:`~iecl_fast.ssl.method.Method`.
        ring: percentiles of the queue, by ascending similarity, that are negatives; None takes the whole queue.
        saib: block that transforms the keys' view.

    Attributes:
        queue: the :class:`iecl_fast.MemoryQueue` of the key encoder's embeddings.
        shuffled: the modules whose batches are shuffled over the ranks.
        step: calls of ``after_step`` so far. It drives ``ring`` and resumes with the state_dict.
    """

    shuffled = ("key_encoder",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: int = 128,
        num_keys: int = 65536,
        momentum: float = 0.999,
        temperature: float = 0.07,
        head: Literal["linear", "mlp", "mlp3"] = "mlp",
        hidden_dim: int | None = None,
        symmetric: bool = False,
        spectral: bool = False,
        entropy_weight: float = 0.2,
        saib_weight_decay: float = 1e-4,
        terms_interval: int = 1,
        jacobian_steps: int = 500,
        ring: RingSchedule | None = None,
        saib: nn.Module | None = None,
    ):
        super().__init__(
            saib=saib,
            entropy_weight=entropy_weight,
            saib_weight_decay=saib_weight_decay,
            terms_interval=terms_interval,
            jacobian_steps=jacobian_steps,
            ring=ring,
        )
        check_temperature(temperature)
        head = ProjectionHead(backbone.feature_dim, dim, head, hidden_dim)
        self.set_encoder(Encoder(backbone, head), spectral)
        self.key_encoder = MomentumEncoder(self.encoder, momentum)
        self.queue = MemoryQueue(num_keys, dim)
        self.temperature = temperature
        self.symmetric = symmetric
        self._pending: list[Tensor] = []  # keys of the forward passes since the last after_step

    def forward(self, views: list[Tensor], index: Tensor | None = None) -> dict[str, Tensor]:
        """The losses of one batch.

        Args:
            views: two tensors (N, 3, H, W); the first holds the queries, the second the keys.
            index: (N,) int64, the images' places in the dataset. Methods with a memory bank need it, MoCo does not.

        Returns:
            Float32 scalars: ``"contrast"``, and the terms of :class:`~iecl_fast.ssl.information.InformationTerms` that
            have a weight.
        """
        self.check_views(views)
        halves = [views, views[::-1]] if self.symmetric else [views]
        parts, keys = zip(*(self._half(*half) for half in halves))
        if self.training:
            self._pending.extend(keys)  # not enqueued before both halves are done: no view meets itself
        return self.mean_losses(parts)

    def _half(self, anchor_images: Tensor, query_images: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The losses with one view as MoCo's query, IE-CL's anchor, and the keys of the other."""
        transformed = self.transform(query_images)
        keys = self._encode_keys(transformed.detach())
        anchors = self.encoder(anchor_images)
        losses = {"contrast": self._contrast(anchors, keys)}
        self._embeddings = {"anchors": anchors.detach(), "others": keys}
        losses |= self.information(transformed, anchors)
        return losses, keys

    def after_step(self) -> None:
        """Move the key encoder, enqueue the keys and count the step. Call it after ``optimizer.step()``, on every rank.

        The original moves the key encoder at the start of the next step, which comes to the same.
        """
        self.key_encoder.update(self.encoder)
        for keys in self._pending:  # one by one: the order is then the same on any number of ranks
            self.queue.enqueue(keys)
        self._pending.clear()
        super().after_step()

    def skip_step(self) -> None:
        """In place of ``after_step`` where the optimiser took no step: count it, and learn nothing from it."""
        self._pending.clear()
        super().skip_step()

    def diagnostics(self) -> dict[str, float]:
        """Figures of the last forward pass, with the ring's percentiles and the filled rows of the queue."""
        lower, upper = self.percentiles()
        figures = {"ring_lower": float(lower), "ring_upper": float(upper), "queue_filled": float(self.queue.filled)}
        return figures | super().diagnostics()

    def _contrast(self, queries: Tensor, keys: Tensor) -> Tensor:
        lower, upper = self.percentiles_of_forward()
        stored = self.queue.keys.to(queries.dtype)  # they differ in a method that was made float16 or float64
        with torch.autocast(queries.device.type, enabled=False):
            return ring_info_nce(queries, keys, stored, lower=lower, upper=upper, temperature=self.temperature)

    @torch.no_grad()
    def _encode_keys(self, images: Tensor) -> Tensor:
        if not self._shuffles():
            return self.key_encoder(images)
        rank, sizes = dist.get_rank(), batch_sizes(images)
        bounds = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        order = _shuffled_order(sizes, seed=int(self.step)).to(images.device)
        keys = gather_rows(self.key_encoder(gather_rows(images)[order[bounds]]))
        return keys[torch.argsort(order)[bounds]]

    def _shuffles(self) -> bool:
        """Whether BatchNorm statistics of a rank's own batch could tell the positive."""
        if not self.training or world_size() == 1:
            return False
        norms = [module for module in self.key_encoder.modules() if isinstance(module, _BatchNorm)]
        return not all(isinstance(norm, nn.SyncBatchNorm) for norm in norms)


def _shuffled_order(sizes: list[int], seed: int) -> Tensor:
    """A permutation of the joined batch that leaves no rank the very images it brings: (sum of sizes,) int64.

    All ranks draw it without talking, and so does a resumed run. Small parts would else stay together now and then.
    """
    generator = torch.Generator().manual_seed(seed)
    own = torch.arange(sum(sizes)).split(sizes)
    while True:
        order = torch.randperm(sum(sizes), generator=generator)
        parts = zip(order.split(sizes), own, strict=True)
        if max(sizes) == sum(sizes) or not any(len(o) and torch.equal(p.sort().values, o) for p, o in parts):
            return order
