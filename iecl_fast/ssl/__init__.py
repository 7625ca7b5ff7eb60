"""Methods of self-supervised learning, all of one shape: :class:`iecl_fast.ssl.moco.MoCo` shows which."""

import inspect
from typing import Any

from torch import nn

from iecl_fast.ssl.cmc import CMC, LabBackbone, build_lab_backbone
from iecl_fast.ssl.encoders import Encoder, ProjectionHead, ResNetBackbone, build_backbone, normalize_rows
from iecl_fast.ssl.instance import InstanceDiscrimination
from iecl_fast.ssl.local_aggregation import LocalAggregation
from iecl_fast.ssl.moco import MoCo
from iecl_fast.ssl.momentum import MomentumEncoder

__all__ = [
    "CMC",
    "METHODS",
    "Encoder",
    "InstanceDiscrimination",
    "LabBackbone",
    "LocalAggregation",
    "MoCo",
    "MomentumEncoder",
    "ProjectionHead",
    "ResNetBackbone",
    "accepts",
    "build_backbone",
    "build_lab_backbone",
    "build_method",
    "normalize_rows",
]

METHODS: dict[str, type[nn.Module]] = {
    "moco": MoCo,
    "ir": InstanceDiscrimination,
    "cmc": CMC,
    "la": LocalAggregation,
}


def accepts(name: str, argument: str) -> bool:
    """Whether the method of that name takes an argument, such as ``"ring"`` or ``"num_images"``."""
    return argument in inspect.signature(METHODS[name].__init__).parameters


def build_method(name: str, backbone: nn.Module, **options: Any) -> nn.Module:
    """A method by its name.

    Args:
        name: a key of ``METHODS``.
        backbone: the network to be trained, (N, 3, H, W) -> (N, ``backbone.feature_dim``); cmc takes a
            :class:`LabBackbone`.
        options: the method's own keyword arguments. ``ring`` may be None for any method.

    Raises:
        ValueError: no method has that name, or a value is not allowed.
        TypeError: the method has no option of that name, or needs one that is missing.
    """
    if name not in METHODS:
        raise ValueError(f"name must be one of {', '.join(METHODS)}, got {name!r}")
    if options.get("ring") is None and not accepts(name, "ring"):
        options.pop("ring", None)
    return METHODS[name](backbone, **options)
