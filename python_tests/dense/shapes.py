"""Tiny data sets in VOC's and COCO's formats, of coloured shapes on noise, and checkpoints of tiny encoders."""

import json

import numpy as np
import torch
from PIL import Image

from checkpoints import write_checkpoint
from iecl_fast.engine import build
from iecl_fast.engine.config import for_method, merge, read_recipe, resolve

CLASSES = ("disc", "square")
COLORS = {"disc": (220, 40, 40), "square": (40, 60, 220)}
WIDTH, HEIGHT = 96, 64
KEYPOINTS = ("left_edge", "right_edge", "middle")
XML = (
    """<annotation><size><width>{width}</width><height>{height}</height><depth>3</depth></size>{objects}</annotation>"""
)
OBJECT = (
    "<object><name>{name}</name><difficult>{difficult}</difficult>"
    "<bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin><xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox></object>"
)


def picture(seed):
    """One disc and one square, side by side in either order.

    Returns:
        image (64, 96, 3) uint8, and two pairs of (class name, mask (64, 96) bool).
    """
    random = np.random.default_rng(seed)
    image = random.integers(90, 130, (HEIGHT, WIDTH, 3)).astype(np.uint8)
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    found = []
    names = CLASSES if seed % 2 else CLASSES[::-1]
    for name, middle in zip(names, (24, 72)):
        radius = int(random.integers(10, 16))
        x, y = middle + int(random.integers(-6, 7)), 32 + int(random.integers(-12, 13))
        across, down = columns - x, rows - y
        inside = across**2 + down**2 <= radius**2 if name == "disc" else (abs(across) <= radius) & (abs(down) <= radius)
        image[inside] = COLORS[name]
        found.append((name, inside))
    return image, found


def box_of(mask):
    """x, y, width, height of a mask."""
    rows, columns = np.nonzero(mask)
    return [int(columns.min()), int(rows.min()), int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1]


# Seeds of the pictures in each part.
TRAIN, TEST = range(12), range(12, 18)


def make_voc(root):
    """A VOC folder with the lists trainval and test of boxes, train and val of masks."""
    for name in ("Annotations", "JPEGImages", "SegmentationClass", "ImageSets/Main", "ImageSets/Segmentation"):
        (root / name).mkdir(parents=True)
    for (boxes, masks), seeds in {
        ("trainval", "train"): TRAIN,
        ("test", "val"): TEST,
    }.items():
        names = [f"{seed:06d}" for seed in seeds]
        (root / "ImageSets" / "Main" / f"{boxes}.txt").write_text("\n".join(names) + "\n")
        (root / "ImageSets" / "Segmentation" / f"{masks}.txt").write_text("\n".join(names) + "\n")
        for seed, name in zip(seeds, names):
            image, found = picture(seed)
            Image.fromarray(image).save(root / "JPEGImages" / f"{name}.jpg", quality=95)
            values, objects = np.zeros((HEIGHT, WIDTH), np.uint8), ""
            for label, mask in found:
                x, y, width, height = box_of(mask)
                objects += OBJECT.format(name=label, difficult=0, box=(x + 1, y + 1, x + width, y + height))
                values[mask] = CLASSES.index(label) + 1
            values[:2] = 255
            Image.fromarray(values).save(root / "SegmentationClass" / f"{name}.png")
            text = XML.format(width=WIDTH, height=HEIGHT, objects=objects)
            (root / "Annotations" / f"{name}.xml").write_text(text)
    return root


def make_coco(root):
    """A COCO folder with the parts train and val, as instances and as keypoints."""
    (root / "annotations").mkdir(parents=True)
    for part, seeds in {"train": TRAIN, "val": TEST}.items():
        (root / part).mkdir()
        images, annotations = [], []
        for seed in seeds:
            image, found = picture(seed)
            Image.fromarray(image).save(root / part / f"{seed}.png")
            images.append({"id": 100 + seed, "file_name": f"{seed}.png", "width": WIDTH, "height": HEIGHT})
            annotations += [annotation(100 + seed, label, mask) for label, mask in found]
        for number, entry in enumerate(annotations):
            entry["id"] = number + 1
        for prefix in ("instances", "person_keypoints"):
            points = {"keypoints": list(KEYPOINTS)} if prefix == "person_keypoints" else {}
            categories = [{"id": 3 * label + 5, "name": name} | points for label, name in enumerate(CLASSES)]
            content = {"images": images, "annotations": annotations, "categories": categories}
            (root / "annotations" / f"{prefix}_{part}.json").write_text(json.dumps(content))
    return root


def annotation(image, label, mask):
    """COCO's entry of one object: a square as a polygon, a disc as run lengths."""
    x, y, width, height = box_of(mask)
    if label == "square":
        segmentation = [[x, y, x + width, y, x + width, y + height, x, y + height]]
    else:
        segmentation = {"size": [HEIGHT, WIDTH], "counts": run_lengths(mask)}
    middle = y + height // 2
    return {
        "image_id": image,
        "category_id": 3 * CLASSES.index(label) + 5,
        "bbox": [x, y, width, height],
        "area": int(mask.sum()),
        "iscrowd": 0,
        "segmentation": segmentation,
        "keypoints": [x, middle, 2, x + width, middle, 2, x + width // 2, middle, 1],
        "num_keypoints": 3,
    }


def run_lengths(mask):
    """COCO's run lengths of a mask (H, W), down its columns, zeros first."""
    flat = mask.T.flatten()
    edges = [0, *(np.nonzero(np.diff(flat.astype(int)))[0] + 1).tolist(), flat.size]
    lengths = np.diff(edges).tolist()
    return [0, *lengths] if flat[0] else lengths


def make_checkpoint(path, *, base="digits_moco", **overrides):
    """A checkpoint of an untrained tiny encoder: a recipe with overrides. Returns its method."""
    tiny = {"encoder": {"width": 8, "stem": "imagenet", "name": "resnet18"}, "ring": None, "saib": None}
    recipe = read_recipe(base)
    if "name" in overrides.get("method", {}):
        recipe = for_method(recipe, overrides["method"]["name"])
    config = resolve(merge(merge(recipe, tiny), {"method": {"dim": 8}} | overrides))
    torch.manual_seed(0)
    method = build.method(config, total_steps=1, batch_size=config.trainer.batch_size, num_images=100)
    write_checkpoint(path, config, method, samples=100, step=7)
    return method
