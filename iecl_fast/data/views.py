"""Views: random versions of an image, made with torchvision.transforms.v2 and drawn reproducibly.

The transforms work on PIL images up to the last step. For images of 32 pixels that is a third faster than on tensors;
at 224 pixels PIL's blur takes a few milliseconds, where the tensor's dense 2-d kernel takes many times that.
"""

import hashlib
import inspect
import struct
from collections.abc import Callable
from typing import Any, Literal

import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from iecl_fast.data.datasets import DatasetInfo

BILINEAR = v2.InterpolationMode.BILINEAR
# Each leaves out more than the one before.
SETS = ("full", "no_gray", "no_color", "crop_only")


class GaussianBlur(v2.Transform):
    """Blur a PIL image with a standard deviation in pixels drawn uniformly from ``sigma``, as MoCo v2 and SimCLR do."""

    def __init__(self, sigma: tuple[float, float] = (0.1, 2.0)):
        super().__init__()
        self.sigma = sigma

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        return {"radius": torch.empty(()).uniform_(*self.sigma).item()}

    def transform(self, inpt: Image.Image, params: dict[str, Any]) -> Image.Image:
        return inpt.filter(ImageFilter.GaussianBlur(**params))


def training_transform(
    *,
    image_size: int,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    crop_scale: tuple[float, float] = (0.2, 1.0),
    rotate: float = 0.0,
    flip: float = 0.5,
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1),
    jitter_probability: float = 0.8,
    gray: float = 0.2,
    blur: float = 0.5,
    set: Literal["full", "no_gray", "no_color", "crop_only"] = "full",
) -> v2.Transform:
    """One random view: an RGB PIL image of any size -> (3, ``image_size``, ``image_size``) float32, standardised.

    The defaults are MoCo v2's (Chen et al. 2020, section 3). MoCo v1's are ``jitter=(0.4, 0.4, 0.4, 0.4),
    jitter_probability=1.0, blur=0.0``.

    Args:
        image_size: side of the view in pixels.
        mean, std: per channel, of values in 0..1.
        crop_scale: least and greatest part of the image's area that a crop covers; (1, 1) only resizes.
        rotate: greatest angle in degrees, to either side; 0 for none.
        flip: probability of a left-right flip.
        jitter: strengths of brightness, contrast, saturation and hue, as ``v2.ColorJitter`` takes them.
        jitter_probability: of any colour jitter at all.
        gray: probability of a view without colour.
        blur: probability of a Gaussian blur with a standard deviation of 0.1 to 2 pixels.
        set: what remains of all these, to see how much a method depends on it (Grill et al. 2020, "Bootstrap Your Own
            Latent", Fig. 3b): "full" is all, "no_gray" is without ``gray``, "no_color" without ``jitter`` too, and
            "crop_only" leaves the crop alone.

    Raises:
        ValueError: a size, an area or a deviation that no image can have; what else torchvision refuses.
    """
    if image_size < 1:
        raise ValueError(f"image_size = {image_size} is not allowed: at least 1")
    if not 0 < crop_scale[0] <= crop_scale[1] <= 1:
        raise ValueError(f"crop_scale = {crop_scale} is not allowed: 0 < least <= greatest <= 1")
    if not all(value > 0 for value in std):
        raise ValueError(f"std = {std} is not allowed: positive numbers")
    if set not in SETS:
        raise ValueError(f"set = {set!r} is not allowed: one of {', '.join(SETS)}")
    if set != "full":
        gray = 0.0
    if set in ("no_color", "crop_only"):
        jitter_probability = 0.0
    if set == "crop_only":
        rotate = flip = blur = 0.0
    steps = [v2.RandomRotation(rotate, interpolation=BILINEAR)] if rotate else []
    if crop_scale == (1.0, 1.0):
        steps.append(v2.Resize((image_size, image_size)))
    else:
        steps.append(v2.RandomResizedCrop(image_size, scale=crop_scale))
    # A step of probability 0 is left out: it would cost time and change nothing.
    if flip:
        steps.append(v2.RandomHorizontalFlip(flip))
    if jitter_probability and any(jitter):
        steps.append(v2.RandomApply([v2.ColorJitter(*jitter)], jitter_probability))
    if gray:
        steps.append(v2.RandomGrayscale(gray))
    if blur:
        steps.append(v2.RandomApply([GaussianBlur()], blur))
    return v2.Compose([*steps, *_standardise(mean, std)])


def evaluation_transform(
    *,
    image_size: int,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    crop_ratio: float = 1.0,
) -> v2.Transform:
    """The view without chance: an RGB PIL image -> (3, ``image_size``, ``image_size``) float32, standardised.

    The shorter side is resized to ``image_size / crop_ratio`` and the middle is cut out; ImageNet's usual 256 and 224
    are ``crop_ratio=0.875``.
    """
    return v2.Compose([*_middle(image_size, crop_ratio), *_standardise(mean, std)])


def pixel_transform(*, image_size: int, crop_ratio: float = 1.0) -> v2.Transform:
    """What :func:`evaluation_transform` standardises, as uint8: (3, ``image_size``, ``image_size``)."""
    return v2.Compose([*_middle(image_size, crop_ratio), v2.PILToTensor()])


def _middle(image_size: int, crop_ratio: float) -> list[v2.Transform]:
    return [v2.Resize(round(image_size / crop_ratio)), v2.CenterCrop(image_size)]


def _standardise(mean: tuple[float, float, float], std: tuple[float, float, float]) -> list[v2.Transform]:
    return [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std, inplace=True)]


def view_options(info: DatasetInfo, **overrides: Any) -> dict[str, Any]:
    """All arguments of :func:`training_transform` for a dataset: MoCo v2's, the dataset's own, then ``overrides``.

    Raises:
        TypeError: an override that is no option.
    """
    parameters = inspect.signature(training_transform).parameters
    for name in overrides:
        if name not in parameters:
            raise TypeError(f"views have no option {name!r}; they are {', '.join(parameters)}")
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    own = {"image_size": info.image_size, "mean": info.mean, "std": info.std, **info.views}
    return {**defaults, **own, **overrides}


class ViewsDataset(Dataset):
    """Several random views of each image: item ``i`` is ``(views, label, i)``.

    The draw depends on (seed, epoch, i) alone: neither the order of access, nor the number of workers, nor what else
    uses torch's generator changes a view, and reading an item leaves that generator as it was.

    Args:
        dataset: items (image, label), the image as ``transform`` takes it.
        transform: one random view of an image; its randomness must come from torch's CPU generator, as transforms.v2's.
        num_views: views of each image.
        seed: the run's seed.
    """

    def __init__(self, dataset: Dataset, transform: Callable[[Any], Tensor], num_views: int = 2, seed: int = 0):
        self.dataset = dataset
        self.transform = transform
        self.num_views = num_views
        self.seed = seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # persistent workers see it change

    def set_epoch(self, epoch: int) -> None:
        """Choose the draw; call it before the epoch's iterator is made."""
        self._epoch.share_memory_().fill_(epoch)  # a deep copy's is not shared any more

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[list[Tensor], int, int]:
        image, label = self.dataset[index]
        # The CPU generator itself: torch.manual_seed would reseed the GPUs' too.
        generator = torch.default_generator
        state = generator.get_state()
        try:
            generator.manual_seed(_mixed_seed(self.seed, int(self._epoch), index))
            views = [self.transform(image) for _ in range(self.num_views)]
        finally:
            generator.set_state(state)
        return views, label, index


def _mixed_seed(*numbers: int) -> int:
    """A 63-bit hash: neighbouring seeds, epochs and indices share no stream."""
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
