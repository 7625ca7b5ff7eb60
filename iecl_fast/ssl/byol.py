"""BYOL (Grill et al. 2020), with SAIB and spectral normalisation as arguments."""

from torch import Tensor, nn

from iecl_fast.ssl.encoders import MLP, Encoder, check_counts, normalize_rows
from iecl_fast.ssl.method import Method
from iecl_fast.ssl.momentum import MomentumEncoder


class BYOL(Method):
    """From one view's embedding a predictor has to guess what the moving average of the network makes of the other.

    Grill et al. 2020, "Bootstrap Your Own Latent", equation 2: the squared distance of unit rows, with each view once
    on either side, here the mean of the two. There are no negatives. The momentum is constant, where the paper raises
    it to 1 over the training.

    With ``saib`` the target's view is transformed, and the target is made of it without gradient. The block learns from
    the entropy of the trained encoder's embeddings of that view, which costs one more pass through it for each side.

    Args:
        backbone: the network to be trained, (N, 3, H, W) -> (N, ``backbone.feature_dim``).
        dim: width C of projection and prediction.
        hidden_dim: units of the one hidden layer of projector and predictor.
        momentum: of the target network.
        spectral: normalise every convolution of both networks by :func:`iecl_fast.spectral_norm`.
        entropy_weight: of the entropy that ``saib`` learns from; without the block there is no such term. 0 leaves the
            block as it was initialised.
        saib_weight_decay, terms_interval, jacobian_steps: see :class:`~iecl_fast.ssl.method.Method`.
        saib: block that transforms the target's view.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: int = 256,
        hidden_dim: int = 4096,
        momentum: float = 0.996,
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
        self.set_encoder(Encoder(backbone, MLP(backbone.feature_dim, hidden_dim, dim)), spectral)
        self.predictor = MLP(dim, hidden_dim, dim)
        self.target_encoder = MomentumEncoder(self.encoder, momentum)

    def forward(self, views: list[Tensor], index: Tensor | None = None) -> dict[str, Tensor]:
        """The losses of one batch.

        Args:
            views: two tensors (N, 3, H, W).
            index: not needed.

        Returns:
            Float32 scalars: ``"regression"``, in 0 .. 4, and ``"entropy"`` with a block that has a weight.
        """
        self.check_views(views)
        parts = [self._half(*half) for half in (views, views[::-1])]
        return self.mean_losses(parts)

    def _half(self, online_images: Tensor, target_images: Tensor) -> dict[str, Tensor]:
        transformed = self.transform(target_images)
        targets = self.target_encoder(transformed.detach())
        projections = self.encoder.project(online_images)
        predictions = normalize_rows(self.predictor(projections))
        self._embeddings = {"anchors": normalize_rows(projections.detach()), "others": targets}
        losses = {"regression": (2 - 2 * (predictions * targets).sum(dim=1)).mean()}
        return losses | self.information(transformed, self._embeddings["anchors"])

    def after_step(self) -> None:
        """Move the target network and count the step. Call it after ``optimizer.step()``, on every rank."""
        self.target_encoder.update(self.encoder)
        super().after_step()
