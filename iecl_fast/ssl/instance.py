"""Instance discrimination (IR; Wu et al. 2018), its negatives optionally the Ring of Wu et al. 2021 (IRing)."""

from typing import Literal

from torch import Tensor, nn

from iecl_fast.ring import RingSchedule
from iecl_fast.ssl.bank import BankContrast, check_places
from iecl_fast.ssl.encoders import Encoder, ProjectionHead
from iecl_fast.ssl.stepped import Stepped


class InstanceDiscrimination(Stepped):
    """Each image is a class of its own: a view has to find its image's entry in a memory bank of all images.

    Wu et al., "Unsupervised Feature Learning via Non-Parametric Instance Discrimination". An entry is a running mean of
    its image's embeddings, so that it needs one view a step and no second encoder. The steps of training are as in
    :class:`iecl_fast.ssl.moco.MoCo`. Ranks that build the method with the same seed hold the same bank ever after.

    Args:
        backbone: the network to be trained, (N, 3, H, W) -> (N, ``backbone.feature_dim``).
        num_images: images of the training set, K entries of the bank.
        dim: width C of the embedding.
        num_samples: negatives of a query, drawn with replacement.
        momentum: of the bank's entries.
        temperature: of the loss.
        head: ``"linear"`` (the paper's) or ``"mlp"``.
        loss: ``"softmax"``, cross entropy; ``"nce"``, the paper's noise-contrastive estimate with a running Z.
        sharded: each rank holds a part of the bank, where it is too large for one device; see
            :class:`iecl_fast.memory_sharded.ShardedMemoryBank`.
        ring: percentiles of the other entries, by ascending similarity, that negatives are drawn from; None is all.

    Attributes:
        num_views: 1.
        contrast: the :class:`iecl_fast.ssl.bank.BankContrast`; ``contrast.bank`` is the memory bank.
        step: calls of ``after_step`` and ``skip_step`` so far.
    """

    num_views = 1

    def __init__(
        self,
        backbone: nn.Module,
        *,
        num_images: int,
        dim: int = 128,
        num_samples: int = 4096,
        momentum: float = 0.5,
        temperature: float = 0.07,
        head: Literal["linear", "mlp"] = "linear",
        loss: Literal["softmax", "nce"] = "softmax",
        sharded: bool = False,
        ring: RingSchedule | None = None,
    ):
        super().__init__(ring)
        self.encoder = Encoder(backbone, ProjectionHead(backbone.feature_dim, dim, head))
        self.contrast = BankContrast(
            num_images,
            dim,
            momentum=momentum,
            temperature=temperature,
            num_samples=num_samples,
            loss=loss,
            sharded=sharded,
        )
        self.look_up_step()

    @property
    def backbone(self) -> nn.Module:
        """The trained network without its head, which evaluation uses."""
        return self.encoder.backbone

    def forward(self, views: list[Tensor], index: Tensor | None = None) -> dict[str, Tensor]:
        """The losses of one batch.

        Args:
            views: one tensor (N, 3, H, W).
            index: (N,) int64, the images' places in the dataset, 0 .. K - 1.

        Returns:
            ``{"contrast": loss}``, a float32 scalar.
        """
        self.check_views(views)
        check_places(index, len(views[0]))
        queries = self.encoder(views[0])
        losses = {"contrast": self._loss(queries, index)}
        if self.training:
            self.contrast.remember(queries, index)
        return losses

    def after_step(self) -> None:
        """Move the bank's entries and count the step. Call it after ``optimizer.step()``, on every rank."""
        self.contrast.after_step()
        self.count_step()

    def skip_step(self) -> None:
        """In place of ``after_step`` where the optimiser took no step: count it, and learn nothing from it."""
        self.contrast.skip_step()
        self.count_step()

    def diagnostics(self) -> dict[str, float]:
        """Figures of the last forward pass for the log. Reads device memory, so it synchronises."""
        lower, upper = self.percentiles()
        return {
            "ring_lower": float(lower),
            "ring_upper": float(upper),
            "positive_similarity": float(self.contrast.positive_similarity),
        }

    def _loss(self, queries: Tensor, index: Tensor) -> Tensor:
        return self.contrast(queries, index, self.percentiles_of_forward())
