"""SimSiam (Chen and He 2021), with SAIB and spectral normalisation as arguments."""

import torch
from torch import Tensor, nn

from iecl_fast.ssl.encoders import MLP, Encoder, check_counts, normalize_rows
from iecl_fast.ssl.method import Method


class SimSiam(Method):
    """From one view's embedding a predictor has to guess the network's own embedding of the other, held fixed.

    Chen and He 2021, "Exploring Simple Siamese Representation Learning", equation 4: minus the cosine, with each view
    once on either side, the mean of the two. No negatives, no momentum encoder; without the stopped gradient it
    collapses. The paper holds the predictor's learning rate constant, which is left to the caller.

    With ``saib`` the target's view is transformed. The block learns from the entropy of the targets, before their
    gradient is stopped; predictions are of the views as they are, so each view passes the encoder twice.

    Args:
        backbone: the network to be trained, (N, 3, H, W) -> (N, ``backbone.feature_dim``).
        dim: width C of projection and prediction; also of the projector's two hidden layers.
        hidden_dim: units of the predictor's hidden layer, a bottleneck.
        spectral: normalise every convolution of the encoder by :func:`iecl_fast.spectral_norm`.
        entropy_weight: of the entropy that ``saib`` learns from; without the block there is no such term. 0 leaves the
            block as it was initialised.
        saib_weight_decay, terms_interval, jacobian_steps: see :class:`~iecl_fast.ssl.method.Method`.
        saib: block that transforms the target's view.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: int = 2048,
        hidden_dim: int = 512,
        spectral: bool = False,
        entropy_weight: float = 0.2,
        saib_weight_decay: float = 1e-4,
        terms_interval: int = 1,
        jacobian_steps: int = 500,
        saib: nn.Module | None = None,
    ):
        super().__init__(
            saib=saib,
            entropy_weight=entropy_weight,
            saib_weight_decay=saib_weight_decay,
            terms_interval=terms_interval,
            jacobian_steps=jacobian_steps,
        )
        check_counts(dim=dim, hidden_dim=hidden_dim)
        self.set_encoder(Encoder(backbone, MLP(backbone.feature_dim, dim, dim, dim, norm_output=True)), spectral)
        self.predictor = MLP(dim, hidden_dim, dim)

    def forward(self, views: list[Tensor], index: Tensor | None = None) -> dict[str, Tensor]:
        """The losses of one batch.

        Args:
            views: two tensors (N, 3, H, W).
            index: not needed.

        Returns:
            Float32 scalars: ``"similarity"``, minus the cosine, in -1 .. 1, and ``"entropy"`` with a block that has a
            weight.
        """
        self.check_views(views)
        projections = [self.encoder.project(view) for view in views]
        if self.saib is None:
            targets = [normalize_rows(projection) for projection in projections]
        else:
            with self.transformed_view(), torch.set_grad_enabled(torch.is_grad_enabled() and self.has_terms()):
                targets = [self.encoder(self.transform(view)) for view in views]
        parts = [self._half(projections[0], targets[1]), self._half(projections[1], targets[0])]
        return self.mean_losses(parts)

    def _half(self, projections: Tensor, targets: Tensor) -> dict[str, Tensor]:
        predictions = normalize_rows(self.predictor(projections))
        anchors = normalize_rows(projections.detach())
        self._embeddings = {"anchors": anchors, "others": targets.detach()}
        losses = {"similarity": -(predictions * targets.detach()).sum(dim=1).mean()}
        return losses | self.information_of(targets, anchors)
