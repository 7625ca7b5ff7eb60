"""Folders in the format of COCO (Lin et al., 2014).

``annotations/instances_NAME.json`` and ``annotations/person_keypoints_NAME.json``, the images of each in ``NAME``.
"""

import json
import math

from iecl_fast.engine.errors import UsageError
from iecl_fast.evaluate.dense.annotations import Annotated, Malformed, Objects, check_box, check_size, image_size

FILES = {"faster_rcnn": "instances", "mask_rcnn": "instances", "keypoint_rcnn": "person_keypoints"}
PAIRS = (("train2017", "val2017"), ("train2014", "val2014"), ("train", "val"))
SMALLEST = 0.01  # pixels of a box; of a smaller one float32 may leave nothing in a large image
SLACK = 1.0  # pixels that a box, whose coordinates are fractions and rounded, may reach beyond the image


def is_coco(folder):
    """Whether a folder has this format."""
    return any((folder / "annotations").glob("*.json"))


def default_lists(folder, model):
    """The names of the parts for training and for testing, two tuples: the first pair that is there."""
    prefix = FILES[model]
    pairs = [pair for pair in PAIRS if all(_file(folder, prefix, name).is_file() for name in pair)]
    train, test = (pairs or PAIRS)[0]
    return (train,), (test,)


def read_objects(folder, names, model):
    """The images of the parts and the objects in them: boxes, and what the model needs beside them.

    Categories become 1 .. n in the order of their ids. An object whose box has no width or no height, or less than
    `SMALLEST` of it, is left out and counted.

    Args:
        folder: `Path`.
        names: of parts, such as train2017.
        model: of `DetectSettings`.

    Returns:
        `Annotated`.

    Raises:
        UsageError: a file is missing or an annotation cannot be used; names file and field.
    """
    parts = [_Part(_file(folder, FILES[model], name), folder / name, model).read() for name in names]
    first = parts[0]
    for name, part in zip(names, parts):
        if (part.classes, part.keypoint_names) != (first.classes, first.keypoint_names):
            raise UsageError(f"{_file(folder, FILES[model], name)}: categories: they are not those of {names[0]}")
    images = [image for part in parts for image in part.images]
    return Annotated(images, first.classes, first.keypoint_names, sum(part.left_out for part in parts))


def _file(folder, prefix, name):
    return folder / "annotations" / f"{prefix}_{name}.json"


class _Part:
    """One annotation file while it is read."""

    def __init__(self, file, folder, model):
        self.file, self.folder, self.model = file, folder, model
        self.left_out = 0

    def read(self):
        content = self._load()
        self._check_ids(content, "categories")
        self._check_ids(content, "images")
        categories = sorted(content["categories"], key=lambda category: category["id"])
        self.labels = {category["id"]: number for number, category in enumerate(categories, start=1)}
        self.classes = tuple(str(self._field(category, "name", "categories")) for category in categories)
        if len(set(self.classes)) < len(self.classes):
            raise Malformed(self.file, "categories.name", list(self.classes), "another name in each category")
        self.keypoint_names = self._read_keypoint_names(categories)
        images = {}
        for number, entry in enumerate(content["images"]):
            where = f"images[{number}]"
            file = self.folder / str(self._field(entry, "file_name", where))
            size = image_size(file, f"{self.file}: {where}.file_name")
            said = [self._whole(entry, side, where) for side in ("width", "height")]
            check_size(self.file, f"{where}.width, height", said, file, size)
            empty = {"masks": [] if self.model == "mask_rcnn" else None}
            empty["keypoints"] = [] if self.model == "keypoint_rcnn" else None
            images[entry["id"]] = Objects(file, *size, [], [], [], [], [], **empty)
        for number, entry in enumerate(content["annotations"]):
            self._add(images, entry, f"annotations[{number}]")
        return Annotated(list(images.values()), self.classes, self.keypoint_names, self.left_out)

    def _load(self):
        if not self.file.is_file():
            there = sorted(path.name for path in self.file.parent.glob("*.json"))
            raise UsageError(f"there is no annotation file {self.file}; beside it are {', '.join(there) or 'none'}")
        try:
            content = json.loads(self.file.read_text(errors="replace"))
        except ValueError as error:
            raise UsageError(f"{self.file} is not valid JSON: {error}") from None
        for key in ("images", "annotations", "categories"):
            entries = content.get(key) if isinstance(content, dict) else None
            if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
                raise Malformed(self.file, key, entries, "a list of objects")
        if not content["images"] or not content["categories"]:
            raise UsageError(f"{self.file}: images and categories must hold at least one each")
        return content

    def _check_ids(self, content, key):
        """Each entry has an id of its own."""
        seen = set()
        for number, entry in enumerate(content[key]):
            where = f"{key}[{number}]"
            if self._whole(entry, "id", where) in seen:
                raise Malformed(self.file, f"{where}.id", entry["id"], "another number in each entry")
            seen.add(entry["id"])

    def _add(self, images, entry, where):
        """An annotation, to the objects of its image."""
        image = images.get(self._whole(entry, "image_id", where))
        if image is None:
            raise Malformed(self.file, f"{where}.image_id", entry["image_id"], "the id of one of the images")
        label = self.labels.get(self._whole(entry, "category_id", where))
        if label is None:
            raise Malformed(self.file, f"{where}.category_id", entry["category_id"], f"one of {list(self.labels)}")
        left, upper, width, height = self._numbers(entry, "bbox", where, 4)
        if width < 0 or height < 0:
            raise Malformed(self.file, f"{where}.bbox", entry["bbox"], "x, y, width, height, the last two not negative")
        crowd = entry.get("iscrowd", 0)
        if crowd not in (0, 1):
            raise Malformed(self.file, f"{where}.iscrowd", crowd, "0 or 1")
        size = (image.width, image.height)
        masks = self._read_mask(entry, where, size) if self.model == "mask_rcnn" else None
        keypoints = self._read_keypoints(entry, where) if self.model == "keypoint_rcnn" else None
        box = (left, upper, left + width, upper + height)
        if width > 0 and height > 0:
            box = check_box(self.file, f"{where}.bbox", box, size, SLACK)
        if box[2] - box[0] < SMALLEST or box[3] - box[1] < SMALLEST:
            self.left_out += 1
            return
        image.boxes.append(box)
        image.labels.append(label)
        image.ignored.append(bool(crowd))
        image.taught.append(not crowd)
        image.areas.append(self._area(entry, where, width * height))
        if masks is not None:
            image.masks.append(masks)
        if keypoints is not None:
            image.keypoints.append(keypoints)

    def _area(self, entry, where, of_box):
        area = entry.get("area", of_box)
        if not _is_number(area) or area < 0:
            raise Malformed(self.file, f"{where}.area", area, "a number of square pixels")
        return float(area)

    def _read_mask(self, entry, where, size):
        """Polygons or run lengths that fit the image."""
        mask, where = self._field(entry, "segmentation", where), f"{where}.segmentation"
        if isinstance(mask, dict):
            said = mask.get("size")
            if said != [size[1], size[0]]:
                allowed = f"[{size[1]}, {size[0]}], the image's height and width"
                raise Malformed(self.file, f"{where}.size", said, allowed)
            counts = mask.get("counts")
            if isinstance(counts, str):
                counts = decompress(counts)
            if not isinstance(counts, list) or not all(isinstance(count, int) and count >= 0 for count in counts):
                allowed = "a list of whole numbers, or their compressed text"
                raise Malformed(self.file, f"{where}.counts", mask.get("counts"), allowed)
            if sum(counts) != size[0] * size[1]:
                allowed = f"run lengths of {size[0] * size[1]} pixels together"
                raise Malformed(self.file, f"{where}.counts", sum(counts), allowed)
            return {"size": said, "counts": counts}
        allowed = "a list of polygons, each x, y of at least 3 points"
        if not isinstance(mask, list) or not mask:
            raise Malformed(self.file, where, mask, allowed)
        for number, polygon in enumerate(mask):
            points = isinstance(polygon, list) and len(polygon) >= 6 and len(polygon) % 2 == 0
            if not points or not all(map(_is_number, polygon)):
                raise Malformed(self.file, f"{where}[{number}]", polygon, allowed)
        return mask

    def _read_keypoint_names(self, categories):
        if self.model != "keypoint_rcnn":
            return None
        names = [self._field(category, "keypoints", "categories") for category in categories]
        if not names[0] or any(other != names[0] for other in names):
            raise Malformed(self.file, "categories.keypoints", names, "a list of names, the same in every category")
        return tuple(map(str, names[0]))

    def _read_keypoints(self, entry, where):
        values, where = self._field(entry, "keypoints", where), f"{where}.keypoints"
        expected = len(self.keypoint_names)
        if not isinstance(values, list) or len(values) != 3 * expected or not all(map(_is_number, values)):
            length = f"{len(values)} values" if isinstance(values, list) else values
            allowed = f"3 numbers for each of {expected} keypoints: x, y, visibility"
            raise Malformed(self.file, where, length, allowed)
        points = list(zip(values[0::3], values[1::3], values[2::3]))
        for number, point in enumerate(points):
            if point[2] not in (0, 1, 2):
                raise Malformed(self.file, f"{where}[{3 * number + 2}]", point[2], "a visibility: 0, 1 or 2")
        return points

    def _field(self, entry, key, where):
        value = entry.get(key)
        if value is None:
            raise Malformed(self.file, f"{where}.{key}", None)
        return value

    def _whole(self, entry, key, where):
        value = self._field(entry, key, where)
        if not isinstance(value, int) or isinstance(value, bool):
            raise Malformed(self.file, f"{where}.{key}", value, "a whole number")
        return value

    def _numbers(self, entry, key, where, count):
        values = self._field(entry, key, where)
        if not isinstance(values, list) or len(values) != count or not all(map(_is_number, values)):
            raise Malformed(self.file, f"{where}.{key}", values, f"a list of {count} numbers")
        return values


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def decompress(text):
    """The run lengths of COCO's compressed text, or None where it is none.

    pycocotools decodes it too, but leaves what a text that is too short does not reach as it lies in memory. Each
    number is in groups of 5 bits, the lowest first, in characters from "0" on; 32 marks that a group follows, 16 in the
    last one a negative number; from the fourth number on it is the difference to the one before the last.
    """
    counts, value, shift = [], 0, 0
    for character in text:
        group = ord(character) - ord("0")
        if not 0 <= group < 64:
            return None
        value |= (group & 31) << shift
        shift += 5
        if group & 32:
            continue
        if group & 16:
            value -= 1 << shift
        counts.append(value + counts[-2] if len(counts) > 2 else value)
        value = shift = 0
    return counts if shift == 0 else None
