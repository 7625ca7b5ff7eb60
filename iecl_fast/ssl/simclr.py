"""SimCLR (Chen et al. 2020), with Ring negatives, SAIB and spectral normalisation as arguments."""

from typing import Literal

import torch
from torch import Tensor, nn

from iecl_fast.ring import RingSchedule, ring_info_nce, ring_ranks
from iecl_fast.ring.ops import check_temperature
from iecl_fast.ssl.encoders import Encoder, ProjectionHead
from iecl_fast.ssl.gather import gather_rows_with_gradient
from iecl_fast.ssl.method import Method


class SimCLR(Method):
    """Each embedding has to find that of the same image's other view among all others of the batch.

    Chen et al. 2020, "A Simple Framework for Contrastive Learning of Visual Representations", equation 1: the 2N - 2
    embeddings of other images, both views, are the negatives. Under ``torch.distributed`` they are those of all ranks,
    and gradients reach all of them. The paper trains with LARS and batches of thousands, which is not done here.

    With ``saib`` the second view is transformed; the block learns from the contrast and from the entropy.

    Args:
        backbone: the network to be trained, (N, 3, H, W) -> (N, ``backbone.feature_dim``).
        dim: width C of the embedding.
        temperature: of the softmax; 0.1 is the paper's on ImageNet, 0.5 on CIFAR-10.
        head, hidden_dim: see :class:`~iecl_fast.ssl.ProjectionHead`.
        spectral: normalise every convolution of the encoder by :func:`iecl_fast.spectral_norm`.
        entropy_weight: of the entropy of the second view's embeddings, only with ``saib``; 0 leaves the term out.
        saib_weight_decay, jacobian_steps: see :class:`~iecl_fast.ssl.method.Method`.
        ring: percentiles of the other images' embeddings, by ascending similarity, that are negatives; None takes all.
        saib: block that transforms the second view.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: int = 128,
        temperature: float = 0.1,
        head: Literal["linear", "mlp", "mlp3"] = "mlp",
        hidden_dim: int | None = None,
        spectral: bool = False,
        entropy_weight: float = 0.2,
        saib_weight_decay: float = 1e-4,
        jacobian_steps: int = 500,
        ring: RingSchedule | None = None,
        saib: nn.Module | None = None,
    ):
        super().__init__(
            saib=saib,
            entropy_weight=entropy_weight,
            saib_weight_decay=saib_weight_decay,
            jacobian_steps=jacobian_steps,
            contrast_reaches_saib=True,
            ring=ring,
        )
        check_temperature(temperature)
        self.set_encoder(Encoder(backbone, ProjectionHead(backbone.feature_dim, dim, head, hidden_dim)), spectral)
        self.temperature = temperature

    def forward(self, views: list[Tensor], index: Tensor | None = None) -> dict[str, Tensor]:
        """The losses of one batch.

        Args:
            views: two tensors (N, 3, H, W).
            index: not needed.

        Returns:
            Float32 scalars: ``"contrast"``, and ``"entropy"`` with a block that has a weight.
        """
        self.check_views(views)
        anchors = self.encoder(views[0])
        transformed = self.transform(views[1])
        with self.transformed_view():
            queries = self.encoder(transformed)
        self._embeddings = {"anchors": anchors.detach(), "others": queries.detach()}
        losses = {"contrast": self._contrast(anchors, queries)}
        if self.terms.active:
            losses |= self.terms(queries, anchors)
        if self.saib is not None:
            self._embeddings["queries"] = queries.detach()
        return losses

    def diagnostics(self) -> dict[str, float]:
        """Figures of the last forward pass, with the ring's percentiles."""
        lower, upper = self.percentiles()
        return {"ring_lower": float(lower), "ring_upper": float(upper)} | super().diagnostics()

    def _contrast(self, first: Tensor, second: Tensor) -> Tensor:
        """The mean loss of this rank's 2N queries among all ranks' keys."""
        all_first, start = gather_rows_with_gradient(first)
        if len(all_first) < 2:
            raise ValueError("views hold 1 image; at least 2 are allowed, as the others are the negatives")
        all_second, _ = gather_rows_with_gradient(second)
        keys = torch.cat([all_first, all_second])
        place = start + torch.arange(len(first), device=first.device)
        positives = torch.cat([place + len(all_first), place])
        lower, upper = self._percentiles_below_itself(len(keys) - 2)
        with torch.autocast(first.device.type, enabled=False):
            return ring_info_nce(
                torch.cat([first, second]),
                torch.cat([second, first]),
                keys,
                lower=lower,
                upper=upper,
                temperature=self.temperature,
                exclude=positives,
            )

    def _percentiles_below_itself(self, others: int) -> tuple[float, float] | tuple[Tensor, Tensor]:
        if self.ring is None:
            return percentiles_below_itself(*self.percentiles_of_forward(), others=others)
        return _scheduled_below_itself(self._percentiles, others).unbind()


def percentiles_below_itself(lower: float, upper: float, *, others: int) -> tuple[float, float]:
    """Percentiles among the other images' embeddings as percentiles among these and the query itself.

    The positive is excluded by its index. The query, of length 1, is the most similar of what remains: so it is left
    out by its rank. (Where rounding ranks a copy of it higher, the copy is left out, which is the same key.)
    """
    ranks = ring_ranks(lower, upper, others)
    # The middle between two ranks: no rounding can move it to another one.
    return tuple(100 * (rank - 0.5) / (others + 1) if rank else 0.0 for rank in ranks)


@torch.library.custom_op("iecl_fast::percentiles_below_itself", mutates_args=())
def _scheduled_below_itself(percentiles: Tensor, others: int) -> Tensor:
    """The same of percentiles that are data to a compiled graph, float64 (2,) on the CPU."""
    return percentiles.new_tensor(percentiles_below_itself(*percentiles.tolist(), others=others))


@_scheduled_below_itself.register_fake
def _(percentiles: Tensor, others: int) -> Tensor:
    return torch.empty_like(percentiles)
