"""What is known of an image, whatever format said it, and what every format's reader checks."""

from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from iecl_fast.data.torchvision_sources import load_image
from iecl_fast.engine.errors import UsageError


@dataclass(frozen=True)
class Objects:
    """An image and the objects in it.

    Attributes:
        image: its file.
        width, height: in pixels.
        boxes: for each object x1, y1, x2, y2 in pixels from the image's corner, so that a box over all of it ends at
            (width, height).
        labels: for each object 1 .. number of classes; 0 is the background.
        ignored: for each object whether a detection of it counts neither as right nor as wrong: difficult in VOC, a
            crowd in COCO.
        taught: for each object whether a model is trained on it: all in VOC, in COCO all but crowds.
        areas: for each object, in square pixels.
        masks: for each object polygons or run lengths as COCO writes them; None where the data has no masks.
        keypoints: for each object its points as (x, y, visibility 0..2); None where the data has no keypoints.
    """

    image: Path
    width: int
    height: int
    boxes: list[tuple[float, float, float, float]]
    labels: list[int]
    ignored: list[bool]
    taught: list[bool]
    areas: list[float]
    masks: list | None = None
    keypoints: list[list[tuple[float, float, float]]] | None = None


@dataclass(frozen=True)
class Annotated:
    """Images with their objects, or with the file of their segmentation mask.

    Attributes:
        images: list of `Objects`, or of triples (image file, mask file, whether a pixel has a class).
        classes: names of the classes 1 .. n.
        keypoint_names: of one object, if the data has keypoints.
        left_out: objects whose box is empty, which the reader has left out.
    """

    images: list
    classes: tuple[str, ...]
    keypoint_names: tuple[str, ...] | None = None
    left_out: int = 0


class Malformed(UsageError):
    """An annotation that cannot be used.

    Args:
        file: in which it stands.
        field: which one, as a path into the file.
        value: what it holds, or None where it is missing.
        allowed: in words; nothing for what is only missing.
    """

    def __init__(self, file, field, value, allowed=""):
        what = "is missing" if value is None else f"{_short(value)} is not allowed"
        super().__init__(f"{file}: {field}: {what}{', it must be ' if allowed else ''}{allowed}")


def _short(value):
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def image_size(file, said_by):
    """Width and height in pixels, of which only the file's head is read.

    Raises:
        UsageError: there is no such image, or it is none; names the annotation that wants it.
    """
    try:
        with Image.open(file) as image:
            return image.size
    except FileNotFoundError:
        raise UsageError(f"{said_by}: there is no image {file}") from None
    except UnidentifiedImageError:
        raise UsageError(f"{said_by}: the image {file} cannot be read: it is empty, damaged or no image") from None
    except OSError as error:
        raise UsageError(f"{said_by}: the image {file} cannot be read: {error}") from None


def check_readable(files):
    """Read images in full: what is wrong with one is not to come out behind hours of training.

    Raises:
        UsageError: the first that cannot be read.
    """
    for file in files:
        try:
            load_image(file)
        except OSError as error:
            raise UsageError(f"an image cannot be read: {error}") from None


def check_size(file, field, said, image, actual):
    """The size that an annotation gives is the image's."""
    if tuple(said) != tuple(actual):
        raise Malformed(file, field, "x".join(map(str, said)), f"{actual[0]}x{actual[1]}, the size of {image}")


def check_box(file, field, box, size, slack=0):
    """A box lies in its image and is not empty.

    Args:
        file, field: where it stands.
        box: x1, y1, x2, y2 in pixels from the image's corner.
        size: width and height of the image.
        slack: pixels that it may reach beyond.

    Returns:
        the box, cut at the image's edges.
    """
    width, height = size
    x1, y1, x2, y2 = box
    if x1 < -slack or y1 < -slack or x2 > width + slack or y2 > height + slack:
        raise Malformed(file, field, tuple(box), f"within the image of {width} x {height} pixels")
    x1, y1, x2, y2 = max(x1, 0.0), max(y1, 0.0), min(x2, float(width)), min(y2, float(height))
    if not (x1 < x2 and y1 < y2):
        raise Malformed(file, field, tuple(box), "a box whose right and lower edges lie beyond its left and upper ones")
    return x1, y1, x2, y2


def read_list(file):
    """The image names in a list of VOC's ImageSets, the first word of each line.

    Raises:
        UsageError: there is no such list, with those that there are; or it is empty.
    """
    if not file.is_file():
        there = sorted(path.stem for path in file.parent.glob("*.txt")) if file.parent.is_dir() else []
        raise UsageError(f"there is no list {file}; {file.parent} has {', '.join(there) or 'none'}")
    names = [line.split()[0] for line in file.read_text(errors="replace").splitlines() if line.strip()]
    if not names:
        raise UsageError(f"the list {file} names no image")
    return names
