"""VOC folders: what is read, and that what cannot be used is named by file and field."""

import shutil

import numpy as np
import pytest
from PIL import Image

from dense import shapes
from iecl_fast.engine.errors import UsageError
from iecl_fast.evaluate.dense import voc
from iecl_fast.evaluate.dense.datasets import SegmentationImages

FIRST = "000000"


@pytest.fixture
def folder(voc_folder, tmp_path):
    """A copy that may be spoilt."""
    return shutil.copytree(voc_folder, tmp_path / "voc")


def spoil(folder, old, new):
    file = folder / "Annotations" / f"{FIRST}.xml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def read(folder, lists=("trainval",)):
    return voc.read_boxes(folder, lists, shapes.CLASSES)


def test_boxes_are_those_of_the_shapes(voc_folder):
    annotated = read(voc_folder)
    assert len(annotated.images) == 12
    for seed, objects in enumerate(annotated.images):
        _, found = shapes.picture(seed)
        corners = [shapes.box_of(mask) for _, mask in found]
        assert objects.boxes == [(x, y, x + width, y + height) for x, y, width, height in corners]
        assert [shapes.CLASSES[label - 1] for label in objects.labels] == [name for name, _ in found]
        assert (objects.width, objects.height) == (shapes.WIDTH, shapes.HEIGHT)
        assert objects.areas == [width * height for _, _, width, height in corners]
        assert objects.image.name == f"{seed:06d}.jpg"


def test_difficult_objects_are_taught_and_not_counted(folder):
    spoil(folder, "<difficult>0", "<difficult>1")
    objects = read(folder).images[0]
    assert objects.ignored == [True, False]
    assert objects.taught == [True, True]


def test_an_object_without_difficult_is_not(folder):
    spoil(folder, "<difficult>0</difficult>", "")
    assert read(folder).images[0].ignored == [False, False]


BOX = "<bndbox><xmin>10</xmin><ymin>10</ymin><xmax>20</xmax><ymax>20</ymax></bndbox>"
OBJECT = f"<annotation><object><name>disc</name>{BOX}</object>"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("<xmin>10</xmin>", "", "object 1/bndbox/xmin: is missing"),
        (BOX, "", "object 1/bndbox/xmin: is missing"),
        ("<xmin>10", "<xmin>ten", "object 1/bndbox/xmin: 'ten' is not allowed, it must be a number"),
        ("<xmin>10", "<xmin>nan", "object 1/bndbox/xmin: 'nan' is not allowed"),
        ("<xmax>20", "<xmax>10", "object 1/bndbox: (10.0, 10.0, 10.0, 20.0) is not allowed, it must be xmin < xmax"),
        ("<ymax>20", "<ymax>5", "object 1/bndbox: (10.0, 10.0, 20.0, 5.0) is not allowed"),
        ("<xmax>20", "<xmax>97", "object 1/bndbox: (9.0, 9.0, 97.0, 20.0) is not allowed, it must be within the image"),
        ("<xmin>10", "<xmin>0", "within the image of 96 x 64 pixels"),
        ("<name>disc</name>", "", "object 1/name: is missing"),
        (
            "<name>disc",
            "<name>disk",
            "object 1/name: 'disk' is not allowed, it must be one of disc, square; did you mean",
        ),
        ("<name>disc</name>", "<name>disc</name><difficult>2</difficult>", "object 1/difficult: '2' is not allowed"),
        ("<width>96", "<width>95", "size: '95x64' is not allowed, it must be 96x64, the size of"),
        ("<width>96</width>", "", "size/width: is missing"),
        ("</annotation>", "", "is not valid XML"),
    ],
)
def test_malformed_annotations(folder, old, new, words):
    spoil(folder, "<annotation>", OBJECT)
    spoil(folder, old, new)
    with pytest.raises(UsageError) as error:
        read(folder)
    assert f"{FIRST}.xml" in str(error.value)
    assert words in str(error.value)


def test_missing_and_unreadable_files(folder):
    image = folder / "JPEGImages" / f"{FIRST}.jpg"
    image.write_bytes(b"no image")
    with pytest.raises(UsageError, match=rf"{FIRST}\.xml: the image .*{FIRST}\.jpg cannot be read"):
        read(folder)
    image.unlink()
    with pytest.raises(UsageError, match=rf"{FIRST}\.xml: there is no image .*{FIRST}\.jpg"):
        read(folder)
    (folder / "Annotations" / f"{FIRST}.xml").unlink()
    with pytest.raises(UsageError, match=rf"there is no annotation .*{FIRST}\.xml"):
        read(folder)
    with pytest.raises(UsageError, match=r"there is no list .*train2\.txt; .* has test, trainval"):
        read(folder, ["train2"])
    (folder / "ImageSets" / "Main" / "empty.txt").write_text("\n")
    with pytest.raises(UsageError, match=r"empty\.txt names no image"):
        read(folder, ["empty"])


def test_several_years(voc_folder, tmp_path):
    for year in ("VOC2007", "VOC2012"):
        shutil.copytree(voc_folder, tmp_path / year)
    assert voc.is_voc(tmp_path)
    assert voc.default_lists(tmp_path, "detect") == (("VOC2007/trainval", "VOC2012/trainval"), ("VOC2007/test",))
    images = read(tmp_path, ("VOC2007/trainval", "VOC2012/test")).images
    assert [image.image.parent.parent.name for image in images] == ["VOC2007"] * 12 + ["VOC2012"] * 6


def test_the_lists_that_are_there_are_taken(folder):
    assert voc.default_lists(folder, "detect") == (("trainval",), ("test",))
    assert voc.default_lists(folder, "segment") == (("train",), ("val",))
    (folder / "ImageSets" / "Segmentation" / "train_aug.txt").write_text(FIRST)
    assert voc.default_lists(folder, "segment") == (("train_aug",), ("val",))


def test_vocs_own_classes_are_the_default(folder):
    with pytest.raises(UsageError, match="aeroplane, bicycle"):
        voc.read_boxes(folder, ["test"])
    assert len(set(voc.CLASSES)) == 20
    assert list(voc.CLASSES) == sorted(voc.CLASSES)


def test_masks(folder):
    annotated = voc.read_masks(folder, ["train"], shapes.CLASSES)
    image, mask, teaches = annotated.images[0]
    assert teaches
    assert (image.name, mask.name) == (f"{FIRST}.jpg", f"{FIRST}.png")
    assert len(annotated.images) == 12


def test_images_whose_masks_hold_no_class_are_left_out_of_training_alone(folder):
    file = folder / "SegmentationClass" / f"{FIRST}.png"
    Image.new("L", Image.open(file).size, voc.UNLABELLED).save(file)
    annotated = voc.read_masks(folder, ["train"], shapes.CLASSES)
    images = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    assert len(SegmentationImages(annotated, **images, crop_size=32)) == 11
    assert len(SegmentationImages(annotated, **images)) == 12


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda mask: mask.resize((95, 64)), "size: '95x64' is not allowed, it must be 96x64"),
        (lambda mask: mask.convert("RGB"), "mode: 'RGB' is not allowed"),
        (
            lambda mask: mask.point(lambda value: 7 if value == 2 else value),
            "values: [7] is not allowed, it must be 0 .. 2",
        ),
        (None, "there is no mask"),
    ],
)
def test_malformed_masks(folder, change, words):
    file = folder / "SegmentationClass" / f"{FIRST}.png"
    mask = Image.open(file).copy()
    assert set(np.unique(mask)) == {0, 1, 2, 255}
    file.unlink()
    if change is not None:
        change(mask).save(file)
    with pytest.raises(UsageError) as error:
        voc.read_masks(folder, ["train"], shapes.CLASSES)
    assert f"{FIRST}.png" in str(error.value)
    assert words in str(error.value)


def test_an_unreadable_mask(folder):
    (folder / "SegmentationClass" / f"{FIRST}.png").write_bytes(b"no image")
    with pytest.raises(UsageError, match=rf"{FIRST}\.png cannot be read"):
        voc.read_masks(folder, ["train"], shapes.CLASSES)
