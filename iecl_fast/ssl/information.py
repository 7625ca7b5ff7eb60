"""The two terms that IE-CL adds to a contrastive loss."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from iecl_fast.entropy import gaussian_entropy, gaussian_kl, knn_entropy, uniformity
from iecl_fast.ssl.encoders import check_counts
from iecl_fast.ssl.gather import gather_rows_with_gradient

NOISE_FLOOR = 0.01  # of the variance that each dimension of evenly spread rows has
ENTROPIES = ("gaussian", "knn", "uniformity")
TERMS = ("kl", "entropy")


class InformationTerms(nn.Module):
    """``-lambda * H(queries) + beta * KL(queries || anchors)``: the entropy of a transformed view is kept high, and the
    distribution of the other view's embeddings near that of its own (Zhang et al. 2026, "Maximizing Incremental
    Information Entropy for Contrastive Learning", algorithm 1).

    As in algorithm 1 the queries of the divergence are detached: it moves the anchors' encoder, and of the two terms
    only the entropy reaches the block that transforms the view.

    Embeddings are unit rows. They are scaled by sqrt(C), so that rows spread evenly over the sphere have variance 1 in
    every dimension, and both terms are given per dimension: the weights then mean the same at any width, which the
    paper leaves open. With several ranks the terms are those of the joined batch.

    Args:
        entropy: H by :func:`iecl_fast.entropy.gaussian_entropy`, :func:`~iecl_fast.entropy.knn_entropy`, or minus
            :func:`~iecl_fast.entropy.uniformity`, which is of the rows as they are and not per dimension.
        entropy_weight: lambda; 0 leaves the term out.
        kl_weight: beta; 0 leaves the term out.
        kl_variance: the variance of :func:`iecl_fast.entropy.gaussian_kl`.
        interval: n steps from one that has the terms to the next. Its gradients count n times, so that their mean over
            the steps is that of n = 1 ("lazy regularisation", Karras et al. 2020, appendix B); between, the terms stand
            in the losses as constants, and what they cost, a pass of the trained encoder, is saved.

    Attributes:
        values: float32 (3,), with an interval: what was computed last, divergence and entropy with their weights and
            the queries' :func:`entropy_per_dimension`.
    """

    values: Tensor

    def __init__(
        self,
        *,
        entropy: Literal["gaussian", "knn", "uniformity"] = "gaussian",
        entropy_weight: float = 0.2,
        kl_weight: float = 0.0,
        kl_variance: Literal["diagonal", "full"] | float = "diagonal",
        interval: int = 1,
    ):
        super().__init__()
        check_counts(terms_interval=interval)
        if entropy not in ENTROPIES:
            raise ValueError(f"entropy must be one of {', '.join(ENTROPIES)}, got {entropy!r}")
        known = kl_variance in ("diagonal", "full") if isinstance(kl_variance, str) else 0 < kl_variance < math.inf
        if not known:
            raise ValueError(f"kl_variance must be diagonal, full or a positive number, got {kl_variance!r}")
        for name, value in (("entropy_weight", entropy_weight), ("kl_weight", kl_weight)):
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be at least 0, got {value}")
        self.entropy = entropy
        self.entropy_weight = entropy_weight
        self.kl_weight = kl_weight
        self.kl_variance = kl_variance
        self.interval = interval
        if interval > 1:
            self.register_buffer("values", torch.zeros(3))

    @property
    def active(self) -> bool:
        """Whether any term has a weight."""
        return self.entropy_weight > 0 or self.kl_weight > 0

    def forward(self, queries: Tensor, anchors: Tensor) -> dict[str, Tensor]:
        """The weighted terms, those without weight left out.

        Args:
            queries: (N, C) unit rows, the trained encoder's embeddings of the transformed view.
            anchors: (N, C) unit rows, those of the other view.

        Returns:
            ``"kl"`` and ``"entropy"``, float32 scalars to be added to the loss.
        """
        losses = self._terms(queries, anchors)
        if self.interval == 1:
            return losses
        if self.training:
            self.values[-1] = entropy_per_dimension(queries.detach())
        return {name: loss.detach() + self.interval * (loss - loss.detach()) for name, loss in losses.items()}

    def remember(self, losses: dict[str, Tensor]) -> None:
        """Keep what :meth:`between` is to give."""
        for place, name in enumerate(TERMS):
            if name in losses:
                self.values[place] = losses[name].detach()

    def between(self) -> dict[str, Tensor]:
        """The terms at a step that does not compute them: constants."""
        weights = (self.kl_weight, self.entropy_weight)
        return {name: value for name, value, weight in zip(TERMS, self.values.clone(), weights) if weight > 0}

    def _terms(self, queries: Tensor, anchors: Tensor) -> dict[str, Tensor]:
        queries, _ = gather_rows_with_gradient(queries)
        if len(queries) < 2:
            raise ValueError(f"views hold {len(queries)} image; an entropy or a divergence needs at least 2")
        losses = {}
        if self.kl_weight > 0:
            anchors, _ = gather_rows_with_gradient(anchors)
            losses["kl"] = self.kl_weight * self._kl(queries.detach(), anchors)
        if self.entropy_weight > 0:
            losses["entropy"] = -self.entropy_weight * self._entropy(queries)
        return losses

    def _entropy(self, rows: Tensor) -> Tensor:
        if self.entropy == "uniformity":
            return -uniformity(rows)
        dim = rows.shape[1]
        if self.entropy == "knn":
            return knn_entropy(rows * math.sqrt(dim), k=min(3, len(rows) - 1)) / dim
        return entropy_per_dimension(rows)

    def _kl(self, queries: Tensor, anchors: Tensor) -> Tensor:
        dim = queries.shape[1]
        scale = math.sqrt(dim)
        return gaussian_kl(queries * scale, anchors * scale, variance=self.kl_variance, noise_floor=NOISE_FLOOR) / dim

    def extra_repr(self) -> str:
        return f"entropy={self.entropy}, entropy_weight={self.entropy_weight}, kl_weight={self.kl_weight}"


def entropy_per_dimension(rows: Tensor) -> Tensor:
    """Gaussian entropy of unit rows (N, C) scaled by sqrt(C), in nats per dimension.

    ``log(2 pi e) / 2 = 1.42`` is reached by rows that are spread evenly, as N goes to infinity; the noise floor of 0.01
    puts the entropy of a collapse at -0.88.
    """
    return gaussian_entropy(rows * math.sqrt(rows.shape[1]), noise_floor=NOISE_FLOOR) / rows.shape[1]
