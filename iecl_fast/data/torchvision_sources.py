"""The data sets that torchvision reads and fetches: where they lie, and which of their parts is which."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch.utils.data import ConcatDataset, Dataset
from torchvision import datasets


def load_image(path: str | Path) -> Image.Image:
    """An RGB image: of an animation the first picture, of one with transparency the colours, of 16 bits the upper 8.

    Raises:
        OSError: it cannot be read, or nobody knows what its numbers mean. With its path, which Pillow does not always
            say.
    """
    try:
        with Image.open(path) as image:
            return _as_rgb(image)
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise OSError(f"{path}: it is empty, damaged or no image") from None
    except Exception as error:  # a decoder that meets damaged bytes may raise anything
        reason = getattr(error, "strerror", None) or str(error)
        raise OSError(f"{path}: {' '.join(reason.split()) or type(error).__name__}") from None


def _as_rgb(image: Image.Image) -> Image.Image:
    """Pillow's own conversion cuts all that is above 255 off, and so makes white of most of a deeper image."""
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise OSError(f"its pixels are numbers of no known range (mode {image.mode}): save it with 8 or 16 bits")
    return image.convert("RGB")


@dataclass(frozen=True)
class Source:
    """A data set of torchvision.

    Attributes:
        kind: torchvision's class.
        place: file or folder below the root.
        train, test: options of ``kind`` for each of the parts that make the split.
        pretrain: likewise, for all that may be trained on without labels; None is ``train``.
        options: of every part.
    """

    kind: type[Dataset]
    place: str
    train: tuple[dict[str, Any], ...]
    test: tuple[dict[str, Any], ...]
    pretrain: tuple[dict[str, Any], ...] | None = None
    options: dict[str, Any] | None = None


def _splits(*names: str) -> tuple[dict[str, str], ...]:
    return tuple({"split": name} for name in names)


# Where a set has a validation part, it is trained on: nothing is chosen by it here.
SOURCES: dict[str, Source] = {
    "cifar10": Source(datasets.CIFAR10, "cifar-10-batches-py", ({"train": True},), ({"train": False},)),
    "cifar100": Source(datasets.CIFAR100, "cifar-100-python", ({"train": True},), ({"train": False},)),
    "stl10": Source(datasets.STL10, "stl10_binary", _splits("train"), _splits("test"), _splits("train+unlabeled")),
    "aircraft": Source(
        datasets.FGVCAircraft,
        "fgvc-aircraft-2013b",
        _splits("trainval"),
        _splits("test"),
        options={"loader": load_image},
    ),
    "dtd": Source(datasets.DTD, "dtd", _splits("train", "val"), _splits("test"), options={"loader": load_image}),
    "flowers102": Source(
        datasets.Flowers102, "flowers-102", _splits("train", "val"), _splits("test"), options={"loader": load_image}
    ),
    "food101": Source(datasets.Food101, "food-101", _splits("train"), _splits("test"), options={"loader": load_image}),
    "gtsrb": Source(datasets.GTSRB, "gtsrb", _splits("train"), _splits("test")),
    "pets": Source(datasets.OxfordIIITPet, "oxford-iiit-pet", _splits("trainval"), _splits("test")),
    "svhn": Source(datasets.SVHN, "train_32x32.mat and test_32x32.mat", _splits("train"), _splits("test")),
}


def torchvision_source(name: str, split: str, root: Path, download: bool) -> tuple[Dataset, list[int], list[str]]:
    """A part of a data set: its images with labels, all labels (-1 for none), the classes' names.

    Raises:
        FileNotFoundError: it is not there, or could not be fetched; the message says what may be done.
    """
    source = SOURCES[name]
    parts = {"test": source.test, "pretrain": source.pretrain or source.train}.get(split, source.train)
    try:
        images = [source.kind(root, **part, **(source.options or {}), download=download) for part in parts]
    except (RuntimeError, OSError) as error:  # torchvision's word for missing or damaged, a failed download
        reason = f"could not be downloaded to {root} ({error})" if download else f"is not in {root}"
        raise FileNotFoundError(
            f"{name} {reason}: looked for {root / source.place}. Let torchvision fetch it with download=True "
            f"(data.download=true on the command line), or name the folder that holds it as root (data.root=FOLDER)"
        ) from error
    labels = [int(label) for part in images for label in _labels(part)]
    return ConcatDataset(images) if len(images) > 1 else images[0], labels, _classes(name, images[0])


def _labels(images):
    """All labels, without reading an image. torchvision keeps them under one of these names."""
    if isinstance(images, datasets.GTSRB):
        return [label for _, label in images._samples]
    return next(getattr(images, name) for name in ("targets", "labels", "_labels") if hasattr(images, name))


def _classes(name, images):
    """The classes' names. Two data sets have numbers alone."""
    numbers = {"gtsrb": 43, "svhn": 10}
    return [str(label) for label in range(numbers[name])] if name in numbers else list(images.classes)
