"""Methods of self-supervised learning, all of one shape: :class:`iecl_fast.ssl.method.Method` shows which."""

import inspect
from typing import Any

from torch import nn

from iecl_fast.ssl.byol import BYOL
from iecl_fast.ssl.cmc import CMC, LabBackbone, build_lab_backbone
from iecl_fast.ssl.encoders import MLP, Encoder, ProjectionHead, ResNetBackbone, build_backbone, normalize_rows
from iecl_fast.ssl.iecl import IECL
from iecl_fast.ssl.information import InformationTerms
from iecl_fast.ssl.instance import InstanceDiscrimination
from iecl_fast.ssl.local_aggregation import LocalAggregation
from iecl_fast.ssl.method import Method
from iecl_fast.ssl.moco import MoCo
from iecl_fast.ssl.momentum import MomentumEncoder
from iecl_fast.ssl.simclr import SimCLR
from iecl_fast.ssl.simsiam import SimSiam

__all__ = [
    "BYOL",
    "CMC",
    "IECL",
    "METHODS",
    "MLP",
    "Encoder",
    "InformationTerms",
    "InstanceDiscrimination",
    "LabBackbone",
    "LocalAggregation",
    "Method",
    "MoCo",
    "MomentumEncoder",
    "ProjectionHead",
    "ResNetBackbone",
    "SimCLR",
    "SimSiam",
    "accepts",
    "build_backbone",
    "build_lab_backbone",
    "build_method",
    "normalize_rows",
]

METHODS: dict[str, type[nn.Module]] = {
    "moco": MoCo,
    "iecl": IECL,
    "simclr": SimCLR,
    "byol": BYOL,
    "simsiam": SimSiam,
    "ir": InstanceDiscrimination,
    "cmc": CMC,
    "la": LocalAggregation,
}


def accepts(name: str, part: str) -> bool:
    """Whether the method of that name takes a part, such as ``"ring"``, ``"saib"`` or ``"num_images"``."""
    return part in inspect.signature(METHODS[name].__init__).parameters


def build_method(name: str, backbone: nn.Module, **options: Any) -> nn.Module:
    """A method by its name.

    Args:
        name: a key of ``METHODS``.
        backbone: the network to be trained, (N, 3, H, W) -> (N, ``backbone.feature_dim``); cmc takes a
            :class:`LabBackbone`.
        options: the method's own keyword arguments. ``ring`` and ``saib`` may be None for any method.

    Raises:
        ValueError: no method has that name, or a value is not allowed.
        TypeError: the method has no option of that name, or needs one that is missing.
    """
    if name not in METHODS:
        raise ValueError(f"name must be one of {', '.join(METHODS)}, got {name!r}")
    for part in ("ring", "saib"):
        if options.get(part) is None and not accepts(name, part):
            options.pop(part, None)
    return METHODS[name](backbone, **options)
