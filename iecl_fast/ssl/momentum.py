"""The momentum encoder: a slowly moving average of a trained network, from which the keys come."""

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


def _is_power_iteration_vector(name: str) -> bool:
    """Whether a buffer is u or v of a spectral norm made with torch's parametrizations (or in their format)."""
    return "parametrizations." in name and name.endswith(("._u", "._v"))


class MomentumEncoder(nn.Module):
    """A copy of a network that follows it by a moving average (He et al. 2020, "Momentum Contrast", equation 2).

    ``update`` pairs parameters **by name**, never by position: two networks whose names or shapes differ are an error.
    The copy takes no gradient, and no optimiser should see it.

    Buffers are not averaged. BatchNorm statistics stay this branch's own, as in the original, which come from its own
    forward passes. Under spectral normalisation the raw weights are averaged, and the vectors u and v of the power
    iteration are copied: the average of two unit vectors is none, and its sigma would be too small.

    The average is taken in the parameters' dtype. In bfloat16 the steps of a momentum of 0.999 round to nothing: keep
    float32 parameters and use autocast.

    Args:
        online: the trained network. It is copied, neither registered nor changed.
        momentum: weight of the old value in each update, 0 <= momentum <= 1.
    """

    def __init__(self, online: nn.Module, momentum: float = 0.999):
        super().__init__()
        if not 0.0 <= momentum <= 1.0:
            raise ValueError(f"momentum must lie in 0..1, got {momentum}")
        self.momentum = momentum
        self.module = copy.deepcopy(online).requires_grad_(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return self.module(images)

    @torch.no_grad()
    def update(self, online: nn.Module) -> None:
        """Move every parameter towards that of ``online``: ``own = momentum * own + (1 - momentum) * online``.

        Raises:
            ValueError: a parameter that exists on one side only or differs in shape; it is named.
        """
        own, other = _paired(self.module.named_parameters(), online.named_parameters())
        get_ema_multi_avg_fn(self.momentum)(own, other, None)
        own, other = _paired(self.module.named_buffers(), online.named_buffers(), _is_power_iteration_vector)
        for mine, theirs in zip(own, other, strict=True):
            mine.copy_(theirs)

    def extra_repr(self) -> str:
        return f"momentum={self.momentum}"


def _paired(
    own_named: Iterable[tuple[str, Tensor]],
    online_named: Iterable[tuple[str, Tensor]],
    keep: Callable[[str], bool] = lambda name: True,
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of two networks whose names satisfy ``keep``, paired by name."""
    own = {name: tensor for name, tensor in own_named if keep(name)}
    online = {name: tensor for name, tensor in online_named if keep(name)}
    for name in [*own, *online]:
        if name not in online or name not in own:
            side = "momentum encoder" if name in own else "online encoder"
            raise ValueError(f"{name} exists only in the {side}: both must be built, and normalised, alike")
        if own[name].shape != online[name].shape:
            shapes = f"{tuple(own[name].shape)} and {tuple(online[name].shape)}"
            raise ValueError(f"{name} has different shapes in the momentum and the online encoder: {shapes}")
    return list(own.values()), [online[name] for name in own]
