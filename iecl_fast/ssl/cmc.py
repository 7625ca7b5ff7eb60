"""Contrastive multiview coding (CMC; Tian et al. 2019), its negatives optionally Ring's (CMCRing, Wu et al. 2021)."""

from typing import Literal

import torch
from torch import Tensor, nn

from iecl_fast.ring import RingSchedule
from iecl_fast.ssl.bank import BankContrast, check_places
from iecl_fast.ssl.encoders import ProjectionHead, build_backbone, normalize_rows
from iecl_fast.ssl.stepped import Stepped

# Linear sRGB to CIE XYZ, from sRGB's primaries and white D65 (IEC 61966-2-1). White is what it makes of (1, 1, 1).
XYZ_OF_RGB = (
    (0.4124564, 0.3575761, 0.1804375),
    (0.2126729, 0.7151522, 0.0721750),
    (0.0193339, 0.1191920, 0.9503041),
)
# The least and greatest L, a and b of any sRGB colour, rounded outwards.
LAB_RANGE = ((0.0, 100.0), (-86.19, 98.24), (-107.87, 94.48))


def rgb_to_lab(images: Tensor) -> Tensor:
    """sRGB (N, 3, H, W) in 0..1 to CIE L*a*b* under D65, float32; L is 0..100, a and b -108..99."""
    images = images.float()
    linear = torch.where(images <= 0.04045, images / 12.92, ((images + 0.055) / 1.055).clamp(min=0) ** 2.4)
    matrix = torch.tensor(XYZ_OF_RGB, device=images.device)
    matrix = matrix / matrix.sum(dim=1, keepdim=True)  # relative to white
    xyz = (matrix[:, :, None, None] * linear[:, None]).sum(dim=2)  # no product of matrices, which might be in TF32
    edge = 6 / 29
    f = torch.where(xyz > edge**3, xyz.clamp(min=edge**3) ** (1 / 3), xyz / (3 * edge**2) + 4 / 29)
    x, y, z = f.unbind(dim=1)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], dim=1)


class LabBackbone(nn.Module):
    """Two networks, one for the lightness of an image and one for its colour; together (N, 3, H, W) -> (N, features).

    The features are both networks' side by side, as the paper evaluates them.

    Args:
        luminance: (N, 1, H, W) -> (N, ``luminance.feature_dim``).
        chroma: (N, 2, H, W) -> (N, ``chroma.feature_dim``).
        mean, std: with which the images were standardised: colours need it undone.
    """

    def __init__(self, luminance: nn.Module, chroma: nn.Module, *, mean: tuple[float, ...], std: tuple[float, ...]):
        super().__init__()
        self.luminance = luminance
        self.chroma = chroma
        self.feature_dim = luminance.feature_dim + chroma.feature_dim
        low, high = torch.tensor(LAB_RANGE).T[..., None, None]
        constants = {"mean": _per_channel(mean), "std": _per_channel(std), "low": low, "high": high}
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)

    def split(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Standardised images (N, 3, H, W) to L (N, 1, H, W) and ab (N, 2, H, W), each in -1..1."""
        with torch.autocast(images.device.type, enabled=False):
            lab = rgb_to_lab((images.float() * self.std + self.mean).clamp(0, 1))
            return ((lab - self.low) / (self.high - self.low) * 2 - 1).to(self.mean.dtype).split((1, 2), dim=1)

    def forward(self, images: Tensor) -> Tensor:
        luminance, chroma = self.split(images)
        return torch.cat([self.luminance(luminance), self.chroma(chroma)], dim=1)

    def feature_map(self, images: Tensor) -> Tensor:
        """What is pooled in the end, both networks' side by side: (N, 3, H, W) -> (N, ``feature_dim``, h, w)."""
        luminance, chroma = self.split(images)
        return torch.cat([self.luminance.feature_map(luminance), self.chroma.feature_map(chroma)], dim=1)


def _per_channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values)[:, None, None]


def build_lab_backbone(
    name: str, stem: str, width: int, *, mean: tuple[float, ...], std: tuple[float, ...]
) -> LabBackbone:
    """Two ResNets of half the width each, so that together they have the features of one; see
    :func:`iecl_fast.ssl.build_backbone`.

    Raises:
        ValueError: the width is odd; what ``build_backbone`` refuses.
    """
    if width % 2:
        raise ValueError(f"width must be even, each of the two networks has half of it, got {width}")
    halves = [build_backbone(name, stem, width // 2, in_channels=channels) for channels in (1, 2)]
    return LabBackbone(*halves, mean=mean, std=std)


class CMC(Stepped):
    """Lightness and colour of an image have to find each other among other images' in two memory banks.

    Tian, Krishnan and Isola, "Contrastive Multiview Coding", with the views L and ab. The embedding of L is compared
    with the bank of ab's, and that of ab with the bank of L's; each bank is moved by its own view's embeddings. Images
    that were turned grey or jittered in colour leave little to be found. The steps of training are as in
    :class:`iecl_fast.ssl.moco.MoCo`.

    Args:
        backbone: its two networks are trained.
        num_images, dim, num_samples, momentum, temperature, head, loss, sharded, ring: as in
            :class:`iecl_fast.ssl.instance.InstanceDiscrimination`, for each of the two banks.

    Attributes:
        num_views: 1; it is split into L and ab here.
        luminance_contrast, chroma_contrast: with the bank of that view's embeddings.
        step: calls of ``after_step`` and ``skip_step`` so far.
    """

    num_views = 1

    def __init__(
        self,
        backbone: LabBackbone,
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
        self.backbone = backbone
        self.luminance_head = ProjectionHead(backbone.luminance.feature_dim, dim, head)
        self.chroma_head = ProjectionHead(backbone.chroma.feature_dim, dim, head)
        options = {
            "momentum": momentum,
            "temperature": temperature,
            "num_samples": num_samples,
            "loss": loss,
            "sharded": sharded,
        }
        self.luminance_contrast = BankContrast(num_images, dim, **options)
        self.chroma_contrast = BankContrast(num_images, dim, **options)
        self.look_up_step()

    def forward(self, views: list[Tensor], index: Tensor | None = None) -> dict[str, Tensor]:
        """The losses of one batch.

        Args:
            views: one tensor (N, 3, H, W), standardised as the backbone was told.
            index: (N,) int64, the images' places in the dataset, 0 .. K - 1.

        Returns:
            ``contrast_luminance``, of L's queries in the bank of ab, and ``contrast_chroma``: float32 scalars.
        """
        self.check_views(views)
        check_places(index, len(views[0]))
        luminance, chroma = self.backbone.split(views[0])
        luminance = normalize_rows(self.luminance_head(self.backbone.luminance(luminance)))
        chroma = normalize_rows(self.chroma_head(self.backbone.chroma(chroma)))
        percentiles = self.percentiles_of_forward()
        losses = {
            "contrast_luminance": self.chroma_contrast(luminance, index, percentiles),
            "contrast_chroma": self.luminance_contrast(chroma, index, percentiles),
        }
        if self.training:
            self.luminance_contrast.remember(luminance, index)
            self.chroma_contrast.remember(chroma, index)
        return losses

    def after_step(self) -> None:
        """Move both banks' entries and count the step. Call it after ``optimizer.step()``, on every rank."""
        self.luminance_contrast.after_step()
        self.chroma_contrast.after_step()
        self.count_step()

    def skip_step(self) -> None:
        """In place of ``after_step`` where the optimiser took no step: count it, and learn nothing from it."""
        self.luminance_contrast.skip_step()
        self.chroma_contrast.skip_step()
        self.count_step()

    def diagnostics(self) -> dict[str, float]:
        """Figures of the last forward pass for the log. Reads device memory, so it synchronises."""
        lower, upper = self.percentiles()
        contrasts = (self.chroma_contrast, self.luminance_contrast)
        return {
            "ring_lower": float(lower),
            "ring_upper": float(upper),
            "positive_similarity": sum(float(contrast.positive_similarity) for contrast in contrasts) / 2,
        }
