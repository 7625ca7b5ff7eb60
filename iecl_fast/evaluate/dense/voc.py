"""Folders in the format of Pascal VOC (Everingham et al., 2010): boxes from XML files, segmentation from PNG files.

``Annotations/*.xml``, ``JPEGImages/*.jpg``, ``SegmentationClass/*.png``, ``ImageSets/Main/*.txt`` and
``ImageSets/Segmentation/*.txt``; or a folder that holds several such, as ``VOC2007`` and ``VOC2012``.
"""

import math
import xml.etree.ElementTree as ElementTree

import numpy as np
from PIL import Image

from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.schema import did_you_mean
from iecl_fast.evaluate.dense.annotations import (
    Annotated,
    Malformed,
    Objects,
    check_box,
    check_size,
    image_size,
    read_list,
)

CLASSES = (
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)
UNLABELLED = 255  # the value of a mask where there is no class, as on the edges of objects

# Where the lists lie, and those that are taken by default: of several years the papers' (train, test), of one folder
# the first pair that is there.
LISTS = {"detect": "Main", "segment": "Segmentation"}
YEARS = {
    "detect": (("VOC2007/trainval", "VOC2012/trainval"), ("VOC2007/test",)),
    "segment": (("VOC2012/train",), ("VOC2012/val",)),
}
PAIRS = {"detect": (("trainval", "test"), ("train", "val")), "segment": (("train_aug", "val"), ("train", "val"))}


def is_voc(folder):
    """Whether a folder has this format, or holds years that have."""
    return _is_year(folder) or any(_is_year(path) for path in folder.glob("VOC*"))


def _is_year(folder):
    return (folder / "ImageSets").is_dir()


def default_lists(folder, task):
    """The names of the lists for training and for testing, two tuples."""
    if not _is_year(folder):
        return YEARS[task]
    lists = folder / "ImageSets" / LISTS[task]
    pairs = [pair for pair in PAIRS[task] if all((lists / f"{name}.txt").is_file() for name in pair)]
    train, test = (pairs or PAIRS[task])[0]
    return (train,), (test,)


def read_boxes(folder, lists, classes=None):
    """The images of the lists and the objects in them.

    VOC counts pixels from 1 and gives the last one inside a box: from there the left and upper edges are moved by one.

    Args:
        folder: `Path`.
        lists: names as `DenseSettings.train` has them.
        classes: names; None for VOC's own.

    Returns:
        `Annotated`.

    Raises:
        UsageError: a file is missing or an annotation cannot be used; names file and field.
    """
    classes = classes or CLASSES
    images = [
        _read_annotation(year, name, classes) for year, listed in _listed(folder, lists, "detect") for name in listed
    ]
    return Annotated(images, classes)


def read_masks(folder, lists, classes=None):
    """The images of the lists, the files of their masks, whose values are 0 .. number of classes, or 255, and whether
    there is a class in them.

    Args and errors as of `read_boxes`.
    """
    classes = classes or CLASSES
    images = []
    for year, listed in _listed(folder, lists, "segment"):
        for name in listed:
            image, mask = year / "JPEGImages" / f"{name}.jpg", year / "SegmentationClass" / f"{name}.png"
            images.append((image, mask, _check_mask(image, mask, len(classes))))
    return Annotated(images, classes)


def _listed(folder, lists, task):
    """For each list its folder and the names in it."""
    for listed in lists:
        year, _, name = listed.rpartition("/")
        year = folder / year
        yield year, read_list(year / "ImageSets" / LISTS[task] / f"{name}.txt")


def _read_annotation(year, name, classes):
    file = year / "Annotations" / f"{name}.xml"
    try:
        root = ElementTree.parse(file).getroot()
    except FileNotFoundError:
        raise UsageError(f"there is no annotation {file} of the image {name}") from None
    except ElementTree.ParseError as error:
        raise UsageError(f"{file} is not valid XML: {error}") from None
    image = year / "JPEGImages" / f"{name}.jpg"
    size = image_size(image, file)
    check_size(file, "size", [int(_number(file, root, f"size/{side}")) for side in ("width", "height")], image, size)
    boxes, labels, ignored = [], [], []
    for number, element in enumerate(root.iter("object"), start=1):
        where = f"object {number}"
        label = _text(file, element, "name", where)
        if label not in classes:
            allowed = f"one of {', '.join(classes)}{did_you_mean(label, classes)}"
            raise Malformed(file, f"{where}/name", label, allowed)
        left, upper, right, lower = (
            _number(file, element, f"bndbox/{edge}", where) for edge in ("xmin", "ymin", "xmax", "ymax")
        )
        if right <= left or lower <= upper:
            raise Malformed(file, f"{where}/bndbox", (left, upper, right, lower), "xmin < xmax and ymin < ymax")
        boxes.append(check_box(file, f"{where}/bndbox", (left - 1, upper - 1, right, lower), size))
        labels.append(classes.index(label) + 1)
        difficult = element.findtext("difficult", "0").strip()
        if difficult not in ("0", "1"):
            raise Malformed(file, f"{where}/difficult", difficult, "0 or 1")
        ignored.append(difficult == "1")
    areas = [(x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in boxes]
    return Objects(image, *size, boxes, labels, ignored, [True] * len(boxes), areas)


def _text(file, element, path, where=""):
    text = element.findtext(path)
    field = f"{where}/{path}" if where else path
    if text is None or not text.strip():
        raise Malformed(file, field, None)
    return text.strip()


def _number(file, element, path, where=""):
    text = _text(file, element, path, where)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise Malformed(file, f"{where}/{path}" if where else path, text, "a number")
    return number


def _check_mask(image, mask, num_classes):
    """Whether a pixel has a class; the background is one."""
    size = image_size(image, mask)
    try:
        with Image.open(mask) as opened:
            mode, mask_size, values = opened.mode, opened.size, np.unique(np.asarray(opened))
    except FileNotFoundError:
        raise UsageError(f"there is no mask {mask} of the image {image}") from None
    except OSError as error:
        raise UsageError(f"the mask {mask} cannot be read: {error}") from None
    if mode not in ("P", "L"):
        raise Malformed(mask, "mode", mode, "P or L: each pixel the number of its class")
    check_size(mask, "size", mask_size, image, size)
    unknown = [int(value) for value in values if num_classes < value != UNLABELLED]
    if unknown:
        raise Malformed(mask, "values", unknown, f"0 .. {num_classes}, or {UNLABELLED} where there is no class")
    return any(value != UNLABELLED for value in values)
