"""torchvision's transfer data sets: tiny copies in their own formats, made here, give the right images and labels."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from iecl_fast.data import build_dataset, dataset_info

# Of each set: images of the training split, by the parts that make it, and of the test split.
PARTS = {
    "aircraft": ({"trainval": 3}, {"test": 2}),
    "dtd": ({"train": 2, "val": 2}, {"test": 2}),
    "flowers102": ({"trnid": 2, "valid": 2}, {"tstid": 3}),
    "food101": ({"train": 4}, {"test": 2}),
    "gtsrb": ({"train": 4}, {"test": 3}),
    "pets": ({"trainval": 4}, {"test": 2}),
    "svhn": ({"train": 4}, {"test": 3}),
}


def save(path, level):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), (level, 0, 0)).save(path, **({"quality": 100} if path.suffix == ".jpg" else {}))


def make_aircraft(root, parts):
    data = root / "fgvc-aircraft-2013b" / "data"
    for part, levels in parts.items():
        for level, _ in levels:
            save(data / "images" / f"{level:07d}.jpg", level)
        lines = [f"{level:07d} {('707 a', '747 b')[label]}" for level, label in levels]
        (data / f"images_variant_{part}.txt").write_text("\n".join(lines))
    (data / "variants.txt").write_text("707 a\n747 b\n")


def make_dtd(root, parts):
    data = root / "dtd" / "dtd"
    (data / "labels").mkdir(parents=True)
    for part, levels in parts.items():
        for level, label in levels:
            save(data / "images" / f"c{label}" / f"{level}.jpg", level)
        (data / "labels" / f"{part}1.txt").write_text("\n".join(f"c{label}/{level}.jpg" for level, label in levels))


def make_flowers102(root, parts):
    data = root / "flowers-102"
    labels = np.zeros(200, dtype=np.uint8)
    for levels in parts.values():
        for level, label in levels:
            save(data / "jpg" / f"image_{level:05d}.jpg", level)
            labels[level - 1] = label + 1
    savemat(data / "imagelabels.mat", {"labels": labels})
    savemat(data / "setid.mat", {part: [level for level, _ in levels] for part, levels in parts.items()})


def make_food101(root, parts):
    data = root / "food-101"
    for part, levels in parts.items():
        names = {f"c{label}": [f"c{label}/{level}" for level, other in levels if other == label] for label in (0, 1)}
        for level, label in levels:
            save(data / "images" / f"c{label}" / f"{level}.jpg", level)
        (data / "meta").mkdir(exist_ok=True)
        (data / "meta" / f"{part}.json").write_text(json.dumps(names))


def make_gtsrb(root, parts):
    data = root / "gtsrb"
    for level, label in parts["train"]:
        save(data / "GTSRB" / "Training" / f"{label:05d}" / f"{level}.ppm", level)
    rows = [f"{level}.ppm;0;0;0;0;0;0;{label}" for level, label in parts["test"]]
    for level, _ in parts["test"]:
        save(data / "GTSRB" / "Final_Test" / "Images" / f"{level}.ppm", level)
    head = "Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId"
    (data / "GT-final_test.csv").write_text("\n".join([head, *rows]))


def make_pets(root, parts):
    data = root / "oxford-iiit-pet"
    (data / "annotations").mkdir(parents=True)
    for part, levels in parts.items():
        for level, _ in levels:
            save(data / "images" / f"cat_{level}.jpg", level)
        lines = [f"cat_{level} {label + 1} 1 1" for level, label in levels]
        (data / "annotations" / f"{part}.txt").write_text("\n".join(lines))


def make_svhn(root, parts):
    for part, levels in parts.items():
        pixels = np.zeros((32, 32, 3, len(levels)), dtype=np.uint8)
        for row, (level, _) in enumerate(levels):
            pixels[:, :, 0, row] = level
        labels = np.array([[label or 10] for _, label in levels], dtype=np.uint8)  # the digit 0 is stored as 10
        savemat(root / f"{part}_32x32.mat", {"X": pixels, "y": labels})


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A function that makes a tiny copy: of image number i the red is 10 (i + 1) and the label i % 2."""
    monkeypatch.setattr("torchvision.datasets.flowers102.check_integrity", lambda *_: True)
    monkeypatch.setattr("torchvision.datasets.svhn.check_integrity", lambda *_: True)

    def make(name):
        number = 0
        parts = {}
        for part, count in (PARTS[name][0] | PARTS[name][1]).items():
            parts[part] = [(10 * (i + 1), i % 2) for i in range(number, number + count)]
            number += count
        globals()[f"make_{name}"](tmp_path, parts)
        return tmp_path

    return make


@pytest.mark.parametrize("name", PARTS)
def test_images_and_labels_of_both_splits(name, tiny):
    root = tiny(name)
    known = {}
    for split, parts in zip(("train", "test"), PARTS[name], strict=True):
        images = build_dataset(name, root=root, split=split)
        assert len(images) == sum(parts.values())
        assert [label for _, label in images] == images.labels.tolist()
        for image, label in images:
            red = round(image.getpixel((0, 0))[0] / 10)
            assert image.mode == "RGB" and label == (red - 1) % 2
            known[red] = split
    total = sum(sum(parts.values()) for parts in PARTS[name])
    assert sorted(known) == list(range(1, total + 1))  # the splits share no image, and none is missing
    assert len(images.classes) in (2, dataset_info(name).num_classes)
    assert all(isinstance(words, str) for words in images.classes)


@pytest.mark.parametrize("name", PARTS)
def test_one_that_is_missing_says_where_and_how(name, tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"{name} is not in .*looked for {tmp_path}.*data\.download=true"):
        build_dataset(name, root=tmp_path)


def test_a_part_that_is_missing_is_a_missing_data_set(tiny):
    root = tiny("dtd")
    (root / "dtd" / "dtd" / "labels" / "val1.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"dtd is not in .*data\.download=true"):
        build_dataset("dtd", root=root)
    assert len(build_dataset("dtd", root=root, split="test")) == 2


def test_an_unreadable_image_is_said_with_its_path(tiny):
    root = tiny("aircraft")
    next((root / "fgvc-aircraft-2013b" / "data" / "images").iterdir()).write_bytes(b"no image")
    with pytest.raises(OSError, match=r"fgvc-aircraft-2013b.*\.jpg: "):
        list(build_dataset("aircraft", root=root)), list(build_dataset("aircraft", root=root, split="test"))


def test_a_subset_holds_the_images_chosen():
    images = build_dataset("digits", limit=40)
    subset = images.subset(torch.tensor([3, 39]))
    assert len(subset) == 2 and subset.classes == images.classes
    assert subset.labels.tolist() == images.labels[[3, 39]].tolist() == [label for _, label in subset]
    assert subset[1][0].tobytes() == images[39][0].tobytes()
