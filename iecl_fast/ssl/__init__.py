"""Methods of self-supervised learning, all of one shape: :class:`iecl_fast.ssl.moco.MoCo` shows which."""

from typing import Any

from torch import nn

from iecl_fast.ring import RingSchedule
from iecl_fast.ssl.encoders import Encoder, ProjectionHead, ResNetBackbone, build_backbone, normalize_rows
from iecl_fast.ssl.moco import MoCo
from iecl_fast.ssl.momentum import MomentumEncoder

__all__ = [
    "METHODS",
    "Encoder",
    "MoCo",
    "MomentumEncoder",
    "ProjectionHead",
    "ResNetBackbone",
    "build_backbone",
    "build_method",
    "normalize_rows",
]

METHODS: dict[str, type[nn.Module]] = {"moco": MoCo}


def build_method(name: str, backbone: nn.Module, *, ring: RingSchedule | None = None, **options: Any) -> nn.Module:
    """A method by its name.

    Args:
        name: a key of ``METHODS``.
        backbone: the network to be trained, (N, 3, H, W) -> (N, ``backbone.feature_dim``).
        ring: percentiles of the negatives, or None for all of them.
        options: the method's own keyword arguments.

    Raises:
        ValueError: no method has that name, or a value is not allowed.
        TypeError: the method has no option of that name.
    """
    if name not in METHODS:
        raise ValueError(f"name must be one of {', '.join(METHODS)}, got {name!r}")
    return METHODS[name](backbone, ring=ring, **options)
