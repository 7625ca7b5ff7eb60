"""Data sets of images: torchvision's, scikit-learn's handwritten digits, and folders with one folder for each class."""

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS, has_file_allowed_extension

from iecl_fast.data.torchvision_sources import SOURCES, load_image, torchvision_source

SPLITS = ("pretrain", "train", "test")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PHOTO_CROP_RATIO = 224 / 256
READ_AT_MOST = 100


@dataclass(frozen=True)
class DatasetInfo:
    """What a model and its views have to know about a data set.

    Attributes:
        num_classes: number of labels.
        image_size: side in pixels of the views that suit it.
        mean, std: per channel, of values in 0..1.
        crop_ratio: part of the resized shorter side that evaluation looks at.
        views: options of :func:`iecl_fast.data.training_transform` in which it departs from MoCo v2.
    """

    num_classes: int
    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    crop_ratio: float = 1.0
    views: dict[str, Any] = field(default_factory=dict)


def _photographs(num_classes: int) -> DatasetInfo:
    return DatasetInfo(num_classes, 224, IMAGENET_MEAN, IMAGENET_STD, crop_ratio=PHOTO_CROP_RATIO)


# A mirrored digit is another sign, grey has no colour to jitter, and strokes two pixels wide do not survive a blur.
DIGIT_VIEWS = {
    "crop_scale": (0.5, 1.0),
    "rotate": 15.0,
    "flip": 0.0,
    "jitter_probability": 0.0,
    "gray": 0.0,
    "blur": 0.0,
}

DATASETS: dict[str, DatasetInfo] = {
    "digits": DatasetInfo(10, 32, (0.3092,) * 3, (0.3487,) * 3, views=DIGIT_VIEWS),
    "cifar10": DatasetInfo(10, 32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), views={"blur": 0.0}),
    "cifar100": DatasetInfo(100, 32, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), views={"blur": 0.0}),
    "stl10": DatasetInfo(10, 96, (0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713)),
    "imagenet": _photographs(1000),
    "aircraft": _photographs(100),
    "dtd": _photographs(47),
    "flowers102": _photographs(102),
    "food101": _photographs(101),
    # A mirrored traffic sign or number is another one.
    "gtsrb": DatasetInfo(43, 32, IMAGENET_MEAN, IMAGENET_STD, views={"flip": 0.0, "blur": 0.0}),
    "pets": _photographs(37),
    "svhn": DatasetInfo(10, 32, IMAGENET_MEAN, IMAGENET_STD, views={"flip": 0.0, "blur": 0.0}),
}


class Digits(Dataset):
    """scikit-learn's 1797 handwritten digits (Alpaydin and Kaynak 1998), shipped with it: nothing is downloaded.

    The 8 x 8 images in 17 grey levels are enlarged to RGB images of 32 pixels. 500 of them, each class in proportion,
    are the test split; which ones never changes.
    """

    def __init__(self, train: bool):
        digits = load_digits()
        parts = train_test_split(np.arange(1797), test_size=500, stratify=digits.target, random_state=0)
        rows = parts[0 if train else 1]
        grey = (digits.images[rows] * (255 / 16)).round().astype(np.uint8)
        self.images = [Image.fromarray(g).resize((32, 32), Image.Resampling.BICUBIC).convert("RGB") for g in grey]
        self.targets = digits.target[rows].tolist()
        self.classes = [str(digit) for digit in digits.target_names]

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.images[index], self.targets[index]


class ClassFolders(datasets.ImageFolder):
    """torchvision's ImageFolder for one part of a tree, whose classes are those of ``train/`` in every part.

    So a class without test images does not shift the labels of those that follow it.
    """

    def __init__(self, part: Path, classes: list[str]):
        self._known = classes
        super().__init__(str(part), loader=load_image, allow_empty=True)

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        unknown = sorted(set(_class_names(Path(directory))) - set(self._known))
        if unknown:
            raise ValueError(f"{directory} has images of classes that train/ has none of: {', '.join(unknown)}")
        return self._known, {name: label for label, name in enumerate(self._known)}


class LabelledImages(Dataset):
    """Chosen rows of a data set, transformed: item ``i`` is ``(transform(image), label)``.

    Args:
        source: items (PIL image, label).
        labels: (len(source),) int64, -1 for unlabelled.
        classes: name of each label.
        rows: (N,) int64, the rows of ``source`` to use.
        transform: applied to the PIL image; None leaves it.

    Attributes:
        labels: (N,) int64, of the chosen rows.
    """

    def __init__(
        self,
        source: Dataset,
        labels: Tensor,
        classes: list[str],
        rows: Tensor,
        transform: Callable[[Image.Image], Any] | None = None,
    ):
        self.source = source
        self.labels = labels[rows]
        self.classes = classes
        self.rows = rows
        self.transform = transform

    def subset(self, rows: Tensor) -> "LabelledImages":
        """Some of these images, (M,) int64 of 0 .. N - 1, transformed as they are here."""
        return LabelledImages(self, self.labels, self.classes, rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, _ = self.source[int(self.rows[index])]
        if self.transform is not None:
            image = self.transform(image)
        return image, int(self.labels[index])


def default_root() -> Path:
    """Where data sets lie when no root is given: the environment variable IECL_FAST_DATA, else a folder in ~/.cache."""
    return Path(os.environ.get("IECL_FAST_DATA", "~/.cache/iecl_fast/data")).expanduser()


def build_dataset(
    name: str,
    *,
    split: str = "train",
    root: str | os.PathLike | None = None,
    transform: Callable[[Image.Image], Any] | None = None,
    limit: int | None = None,
    download: bool = False,
) -> LabelledImages:
    """A data set by its name, or from a folder.

    Args:
        name: one of ``DATASETS``, or a folder with ``train/<class>/`` and ``test/<class>/`` (or ``val/<class>/``).
        split: ``"train"`` or ``"test"``, labelled; or ``"pretrain"``, all that may be trained on without labels: for
            STL-10 also its 100,000 unlabelled images, for the others the same as ``"train"``.
        root: folder that holds the data sets; :func:`default_root` if None.
        transform: applied to each RGB PIL image.
        limit: use only this many images: the classes in equal parts as far as they reach, always the same ones, and
            a smaller limit's are among a larger one's.
        download: let torchvision fetch a data set that is missing.

    Raises:
        ValueError: an unknown name or split, or a limit outside 1..number of images.
        FileNotFoundError: the data is not there; the message says where it was looked for and how to get it.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    _check_name(name)
    root = default_root() if root is None else Path(root).expanduser()
    if name in SOURCES:
        source, labels, classes = torchvision_source(name, split, root, download)
    else:
        source = Digits(train=split != "test") if name == "digits" else _folder_source(_tree(name, root), split)
        labels, classes = source.targets, source.classes
    labels = torch.as_tensor(labels, dtype=torch.int64)
    rows = torch.arange(len(labels)) if limit is None else balanced_rows(labels, limit)
    return LabelledImages(source, labels, classes, rows, transform)


def dataset_info(name: str, *, root: str | os.PathLike | None = None) -> DatasetInfo:
    """What a model and its views have to know about a data set; arguments and errors as for :func:`build_dataset`.

    Of a folder the classes are counted and one image is measured: views keep the size of small images (up to 128
    pixels) and are 224 pixels otherwise. Mean and standard deviation are then ImageNet's.
    """
    _check_name(name)
    if name in DATASETS:
        return DATASETS[name]
    tree = _tree(name, default_root() if root is None else Path(root).expanduser())
    source = _folder_source(tree, "train")
    side = min(_size_of_first(source))
    small = side <= 128
    return DatasetInfo(
        num_classes=len(source.classes),
        image_size=side if small else 224,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        crop_ratio=1.0 if small else PHOTO_CROP_RATIO,
        views={"blur": 0.0} if side < 64 else {},
    )


def _size_of_first(source: ClassFolders) -> tuple[int, int]:
    """Of the first image that can be read, within reason: a whole folder of others is not looked through."""
    for row in range(min(len(source), READ_AT_MOST)):
        try:
            return source[row][0].size
        except OSError as error:
            fault = error
    raise fault


def balanced_rows(labels: Tensor, limit: int, seed: int = 0) -> Tensor:
    """Choose ``limit`` rows so that the classes are as equally many as they can be: (N,) -> (limit,) int64, ascending.

    A shuffle that depends on the seed alone orders the images of each class; the choice goes round the classes. With
    unlabelled images (-1) it is a plain random choice.
    """
    if not 1 <= limit <= len(labels):
        raise ValueError(f"limit must lie in 1..{len(labels)}, the number of images, got {limit}")
    # numpy's RandomState is frozen: no later release draws another permutation.
    order = torch.from_numpy(np.random.RandomState(seed).permutation(len(labels)))
    if (labels < 0).any():
        return order[:limit].sort().values
    sorted_labels, by_class = torch.sort(labels[order], stable=True)
    place = torch.arange(len(labels)) - torch.searchsorted(sorted_labels, sorted_labels)  # within its class
    return order[by_class[torch.argsort(place, stable=True)[:limit]]].sort().values


def _check_name(name: str) -> None:
    if name in DATASETS or Path(name).is_dir():
        return
    near = difflib.get_close_matches(name, DATASETS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"data must be one of {', '.join(DATASETS)} or an existing folder, got {name!r}{hint}")


def _tree(name: str, root: Path) -> Path:
    if name != "imagenet":
        return Path(name)
    if not (root / "imagenet" / "train").is_dir():
        raise FileNotFoundError(
            f"imagenet is not in {root}: looked for {root / 'imagenet' / 'train'}. It cannot be downloaded without an "
            f"account: get the ILSVRC2012 archives from image-net.org, let torchvision.datasets.ImageNet unpack them "
            f"there, or give the folder that holds train/ and val/ as the data set itself"
        )
    return root / "imagenet"


def _folder_source(tree: Path, split: str) -> ClassFolders:
    names = ("test", "val") if split == "test" else ("train",)
    parts = [tree / name for name in names if (tree / name).is_dir()]
    if not parts or not (tree / "train").is_dir():
        wanted = " or ".join(str(tree / name) for name in names) if not parts else tree / "train"
        raise FileNotFoundError(
            f"there is no folder {wanted}. A data set's folder holds train/<class>/ and test/<class>/ (or val/<class>/)"
        )
    classes = _class_names(tree / "train")
    for part in (tree / "train", parts[0]):
        if not _class_names(part):
            raise FileNotFoundError(f"there are no images in {part}/<class>/; known are {', '.join(IMG_EXTENSIONS)}")
    return ClassFolders(parts[0], classes)


def _class_names(part: Path) -> list[str]:
    """The folders with images. Others are no classes: a class without training images could never be recognised."""
    return sorted(entry.name for entry in part.iterdir() if entry.is_dir() and _has_images(entry))


def _has_images(folder: Path) -> bool:
    walk = os.walk(folder, followlinks=True)  # as torchvision does
    return any(has_file_allowed_extension(file, IMG_EXTENSIONS) for _, _, files in walk for file in files)
