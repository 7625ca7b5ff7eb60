"""Encoders: torchvision's ResNets without their classifier, projection heads, and the two joined."""

import itertools
from typing import Literal

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

BACKBONES: dict[str, tuple[type[BasicBlock | Bottleneck], list[int]]] = {
    "resnet18": (BasicBlock, [2, 2, 2, 2]),
    "resnet34": (BasicBlock, [3, 4, 6, 3]),
    "resnet50": (Bottleneck, [3, 4, 6, 3]),
}
STEMS = ("imagenet", "small")
HEADS = ("linear", "mlp", "mlp3")


class ResNetBackbone(torchvision.models.ResNet):
    """torchvision's ResNet that ends with the pooled features: (N, 3, H, W) -> (N, ``feature_dim``).

    At ``width=64`` with the imagenet stem the state_dict is torchvision's without the two ``fc`` entries.

    Args:
        block, layers: residual block and number of blocks in each of the four stages.
        stem: ``"imagenet"`` is a 7x7 convolution of stride 2 and a max pool, ``"small"`` one 3x3 convolution of stride
            1, for images of about 32 pixels (He et al. 2016, "Deep Residual Learning", section 4.2).
        width: channels of the first stage; the others have 2, 4 and 8 times as many.
        in_channels: channels of an image.
    """

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        layers: list[int],
        stem: str,
        width: int,
        in_channels: int = 3,
    ):
        super().__init__(block, layers)
        if stem == "small" or width != 64 or in_channels != 3:
            self._rebuild(block, layers, stem, width, in_channels)
        self.fc = nn.Identity()
        self.feature_dim = 8 * width * block.expansion

    def feature_map(self, images: Tensor) -> Tensor:
        """What is pooled in the end: (N, 3, H, W) -> (N, ``feature_dim``, h, w); 7 x 7 for 224 pixels."""
        features = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        return self.layer4(self.layer3(self.layer2(self.layer1(features))))

    def _rebuild(
        self, block: type[BasicBlock | Bottleneck], layers: list[int], stem: str, width: int, in_channels: int
    ) -> None:
        """Replace the layers of the full-width ImageNet network, with torchvision's own initialisation."""
        if stem == "small":
            self.conv1 = nn.Conv2d(in_channels, width, kernel_size=3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        else:
            self.conv1 = nn.Conv2d(in_channels, width, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.inplanes = width
        for stage, blocks in enumerate(layers):
            planes, stride = width * 2**stage, min(stage + 1, 2)
            setattr(self, f"layer{stage + 1}", self._make_layer(block, planes, blocks, stride))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def build_backbone(
    name: str = "resnet18", stem: str = "imagenet", width: int = 64, *, in_channels: int = 3
) -> ResNetBackbone:
    """A randomly initialised ResNet without classifier; see :class:`ResNetBackbone`.

    Args:
        name: ``"resnet18"``, ``"resnet34"`` or ``"resnet50"``.
        stem: ``"imagenet"``, or ``"small"`` for images of about 32 pixels.
        width: channels of the first stage, 64 in the paper; 16 makes a ResNet-18 that two CPU cores can train.
        in_channels: channels of an image.

    Raises:
        ValueError: an unknown name or stem, or a width below 1.
    """
    if name not in BACKBONES:
        raise ValueError(f"name must be one of {', '.join(BACKBONES)}, got {name!r}")
    if stem not in STEMS:
        raise ValueError(f"stem must be one of {', '.join(STEMS)}, got {stem!r}")
    check_counts(width=width)
    return ResNetBackbone(*BACKBONES[name], stem=stem, width=width, in_channels=in_channels)


def check_counts(**counts: int) -> None:
    """ValueError unless each is at least 1."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


class MLP(nn.Sequential):
    """Linear layers with BatchNorm and ReLU between them: (N, ``dims[0]``) -> (N, ``dims[-1]``).

    Args:
        dims: widths of the input, of every hidden layer and of the output.
        norm_output: BatchNorm after the last layer too.
    """

    def __init__(self, *dims: int, norm_output: bool = False):
        layers = []
        for width, hidden in itertools.pairwise(dims[:-1]):
            # BatchNorm takes away what a bias adds.
            layers += [nn.Linear(width, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True)]
        layers.append(nn.Linear(dims[-2], dims[-1], bias=not norm_output))
        super().__init__(*layers, *([nn.BatchNorm1d(dims[-1])] if norm_output else []))


class ProjectionHead(nn.Sequential):
    """Maps features to the space in which they are compared: (N, ``in_dim``) -> (N, ``dim``).

    Args:
        in_dim: width of the features.
        dim: width of the projection.
        kind: ``"linear"``, one layer (MoCo v1); ``"mlp"``, two with a ReLU between them (MoCo v2: Chen et al. 2020,
            "Improved Baselines with Momentum Contrastive Learning"); ``"mlp3"``, three with BatchNorm and ReLU between
            them (IE-CL: Zhang et al. 2026).
        hidden_dim: units of the hidden layers; None takes ``in_dim``, as MoCo v2 does.
    """

    def __init__(
        self, in_dim: int, dim: int, kind: Literal["linear", "mlp", "mlp3"] = "mlp", hidden_dim: int | None = None
    ):
        if kind not in HEADS:
            raise ValueError(f"kind must be one of {', '.join(HEADS)}, got {kind!r}")
        hidden = in_dim if hidden_dim is None else hidden_dim
        check_counts(dim=dim, hidden_dim=hidden)
        if kind == "linear":
            super().__init__(nn.Linear(in_dim, dim))
        elif kind == "mlp":
            super().__init__(nn.Linear(in_dim, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, dim))
        else:
            super().__init__(*MLP(in_dim, hidden, hidden, dim))


def normalize_rows(rows: Tensor, eps: float = 1e-12) -> Tensor:
    """Rows of Euclidean length 1, in float32 whatever the input's dtype: (N, C) -> (N, C).

    A row no longer than ``eps`` has no direction: it becomes zero and gets a zero gradient, where a division by ``eps``
    would give one that overflows float16.
    """
    rows = rows.float()
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / torch.where(norms > eps, norms, torch.inf)


class Encoder(nn.Module):
    """Backbone and head: images (N, 3, H, W) -> float32 unit rows (N, C)."""

    def __init__(self, backbone: nn.Module, head: nn.Module):
        super().__init__()
        self.backbone = backbone
        self.head = head

    def project(self, images: Tensor) -> Tensor:
        """The head's output as it comes, (N, C)."""
        return self.head(self.backbone(images))

    def forward(self, images: Tensor) -> Tensor:
        return normalize_rows(self.project(images))
