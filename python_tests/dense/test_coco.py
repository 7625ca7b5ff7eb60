"""COCO folders: what is read, and that what cannot be used is named by file and field."""

import copy
import json
import shutil

import numpy as np
import pytest
from pycocotools import mask as run_lengths

from dense import shapes
from iecl_fast.engine.errors import UsageError
from iecl_fast.evaluate.dense import coco
from iecl_fast.evaluate.dense.datasets import DetectionImages

PREFIXES = {"faster_rcnn": "instances", "mask_rcnn": "instances", "keypoint_rcnn": "person_keypoints"}


def file_of(folder, model):
    return folder / "annotations" / f"{PREFIXES[model]}_train.json"


@pytest.fixture(scope="module")
def content(coco_folder):
    return {model: json.loads(file_of(coco_folder, model).read_text()) for model in PREFIXES}


@pytest.fixture
def read_changed(coco_folder, content, tmp_path):
    """Reads the training part after a change: a function of the file's content."""

    def read(change, model="mask_rcnn"):
        changed = copy.deepcopy(content[model])
        changed = change(changed) or changed
        (tmp_path / "annotations").mkdir()
        file_of(tmp_path, model).write_text(changed if isinstance(changed, str) else json.dumps(changed))
        shutil.copytree(coco_folder / "train", tmp_path / "train")
        return coco.read_objects(tmp_path, ["train"], model)

    return read


def test_boxes_and_masks_are_those_of_the_shapes(coco_folder):
    annotated = coco.read_objects(coco_folder, ["train"], "mask_rcnn")
    assert annotated.classes == shapes.CLASSES
    images = DetectionImages(annotated, training=False)
    assert len(images) == 12
    for seed in range(12):
        _, found = shapes.picture(seed)
        image, target = images[seed]
        assert image.shape == (3, shapes.HEIGHT, shapes.WIDTH)
        assert [shapes.CLASSES[label - 1] for label in target["labels"]] == [name for name, _ in found]
        for row, (_, mask) in enumerate(found):
            assert np.array_equal(target["masks"][row].numpy(), mask)
            x, y, width, height = shapes.box_of(mask)
            assert target["boxes"][row].tolist() == [x, y, x + width, y + height]
            assert target["area"][row] == mask.sum()


def test_keypoints(coco_folder):
    annotated = coco.read_objects(coco_folder, ["val"], "keypoint_rcnn")
    assert annotated.keypoint_names == shapes.KEYPOINTS
    _, target = DetectionImages(annotated, training=False)[0]
    box = target["boxes"][0]
    middle = box[1] + (box[3] - box[1]) // 2
    expected = [[box[0], middle, 2], [box[2], middle, 2], [box[0] + (box[2] - box[0]) // 2, middle, 1]]
    assert target["keypoints"][0].tolist() == expected


def test_default_lists(coco_folder):
    assert coco.is_coco(coco_folder)
    assert coco.default_lists(coco_folder, "mask_rcnn") == (("train",), ("val",))


@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 0.9, 1.0])
def test_compressed_run_lengths_are_pycocotools_own(density):
    mask = np.asfortranarray(np.random.default_rng(0).random((140, 150)) < density, dtype=np.uint8)
    encoded = run_lengths.encode(mask)["counts"].decode()
    assert coco.decompress(encoded) == shapes.run_lengths(mask)


@pytest.mark.parametrize("text", ["!", "0 4", "o", "0p"])
def test_text_that_is_no_run_lengths(text):
    assert coco.decompress(text) is None


def test_a_compressed_mask_is_read(read_changed):
    _, found = shapes.picture(0)
    encoded = run_lengths.encode(np.asfortranarray(found[0][1], dtype=np.uint8))["counts"].decode()

    def change(content):
        content["annotations"][0]["segmentation"] = {"size": [shapes.HEIGHT, shapes.WIDTH], "counts": encoded}

    _, target = DetectionImages(read_changed(change), training=True)[0]
    assert np.array_equal(target["masks"][0].numpy(), found[0][1])


def test_crowds_are_not_taught_and_not_counted(read_changed):
    annotated = read_changed(lambda content: content["annotations"][0].update(iscrowd=1))
    _, taught = DetectionImages(annotated, training=True)[0]
    _, counted = DetectionImages(annotated, training=False)[0]
    assert len(taught["labels"]) == len(taught["masks"]) == 1
    assert counted["iscrowd"].tolist() == [1, 0]


def test_images_without_objects_are_left_out_of_training_alone(read_changed):
    annotated = read_changed(lambda content: content["annotations"].__delitem__(slice(0, 2)))
    assert (len(DetectionImages(annotated, training=True)), len(DetectionImages(annotated, training=False))) == (11, 12)


def test_images_without_visible_keypoints_are_left_out_of_training_alone(read_changed):
    def change(content):
        for entry in content["annotations"][:2]:
            entry["keypoints"] = [0] * 9

    annotated = read_changed(change, "keypoint_rcnn")
    assert (len(DetectionImages(annotated, training=True)), len(DetectionImages(annotated, training=False))) == (11, 12)


@pytest.mark.parametrize("bbox", [[5, 5, 0, 7], [5, 5, 7, 1e-9], [95.999, 5, 0.5, 7]])
def test_empty_boxes_are_left_out_and_counted(read_changed, bbox):
    annotated = read_changed(lambda content: content["annotations"][0].update(bbox=bbox))
    assert annotated.left_out == 1
    assert len(annotated.images[0].boxes) == len(annotated.images[0].masks) == 1


def test_a_box_less_than_a_pixel_beyond_is_cut(read_changed):
    annotated = read_changed(lambda content: content["annotations"][0].update(bbox=[90, 5, 6.5, 7]))
    assert annotated.images[0].boxes[0] == (90, 5, 96, 12)


def of_annotation(**values):
    """A change of the third annotation; None takes a key away."""

    def change(content):
        for key, value in values.items():
            content["annotations"][2][key] = value
            if value is None:
                del content["annotations"][2][key]

    return change


def of_image(**values):
    return lambda content: content["images"][1].update(values)


SIZE = [shapes.HEIGHT, shapes.WIDTH]
MALFORMED = [
    (lambda content: "{", "is not valid JSON"),
    (lambda content: "[]", "images: is missing"),
    (lambda content: content | {"images": 3}, "images: 3 is not allowed, it must be a list of objects"),
    (lambda content: content | {"categories": []}, "images and categories must hold at least one each"),
    (lambda content: content["categories"][1].update(id=5), "categories[1].id: 5 is not allowed"),
    (lambda content: content["categories"][1].update(name=None), "categories.name: is missing"),
    (of_image(id="x"), "images[1].id: 'x' is not allowed, it must be a whole number"),
    (of_image(id=100), "images[1].id: 100 is not allowed, it must be another number in each entry"),
    (of_image(file_name=None), "images[1].file_name: is missing"),
    (of_image(file_name="no.png"), "images[1].file_name: there is no image"),
    (of_image(width=97), "images[1].width, height: '97x64' is not allowed, it must be 96x64"),
    (of_annotation(image_id=9), "annotations[2].image_id: 9 is not allowed"),
    (of_annotation(category_id=9), "annotations[2].category_id: 9 is not allowed, it must be one of [5, 8]"),
    (of_annotation(category_id=None), "annotations[2].category_id: is missing"),
    (of_annotation(bbox=None), "annotations[2].bbox: is missing"),
    (of_annotation(bbox=[1, 2, 3]), "annotations[2].bbox: [1, 2, 3] is not allowed, it must be a list of 4 numbers"),
    (of_annotation(bbox=[1, 2, 3, "4"]), "annotations[2].bbox"),
    (of_annotation(bbox=[1, 2, float("nan"), 4]), "annotations[2].bbox"),
    (of_annotation(bbox=[5, 5, -3, 4]), "annotations[2].bbox: [5, 5, -3, 4] is not allowed"),
    (of_annotation(bbox=[90, 5, 8, 4]), "annotations[2].bbox: (90, 5, 98, 9) is not allowed, it must be within"),
    (of_annotation(iscrowd=2), "annotations[2].iscrowd: 2 is not allowed"),
    (of_annotation(area=-1), "annotations[2].area: -1 is not allowed"),
    (of_annotation(segmentation=None), "annotations[2].segmentation: is missing"),
    (of_annotation(segmentation=[]), "annotations[2].segmentation: [] is not allowed, it must be a list of polygons"),
    (of_annotation(segmentation=[[1, 2, 3, 4]]), "annotations[2].segmentation[0]: [1, 2, 3, 4] is not allowed"),
    (of_annotation(segmentation=[[1, 2, 3, 4, 5, 6, 7]]), "annotations[2].segmentation[0]"),
    (of_annotation(segmentation=[[1, 2, 3, 4, 5, "6"]]), "annotations[2].segmentation[0]"),
    (of_annotation(segmentation={"size": [64, 95], "counts": []}), "annotations[2].segmentation.size: [64, 95]"),
    (of_annotation(segmentation={"size": SIZE, "counts": [1, 2]}), "annotations[2].segmentation.counts: 3 is not"),
    (of_annotation(segmentation={"size": SIZE, "counts": "04"}), "annotations[2].segmentation.counts: 4 is not"),
    (of_annotation(segmentation={"size": SIZE, "counts": "!"}), "annotations[2].segmentation.counts: '!' is not"),
    (of_annotation(segmentation={"size": SIZE, "counts": [6145, -1]}), "annotations[2].segmentation.counts: [6145"),
]
KEYPOINTS_MALFORMED = [
    (of_annotation(keypoints=[1, 2]), "annotations[2].keypoints: '2 values' is not allowed, it must be 3 numbers for"),
    (of_annotation(keypoints=[1, 2, 1] * 2), "annotations[2].keypoints: '6 values' is not allowed"),
    (of_annotation(keypoints=None), "annotations[2].keypoints: is missing"),
    (of_annotation(keypoints=[1, 2, 1] * 2 + [1, 2, 3]), "annotations[2].keypoints[8]: 3 is not allowed"),
    (lambda content: content["categories"][1].update(keypoints=["a"]), "categories.keypoints"),
]


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [("mask_rcnn", *case) for case in MALFORMED] + [("keypoint_rcnn", *case) for case in KEYPOINTS_MALFORMED],
)
def test_malformed_annotations(read_changed, model, change, words):
    with pytest.raises(UsageError) as error:
        read_changed(change, model)
    assert f"{PREFIXES[model]}_train.json" in str(error.value)
    assert words in str(error.value)


def test_boxes_alone_need_no_masks(read_changed):
    annotated = read_changed(of_annotation(segmentation=None), "faster_rcnn")
    assert annotated.images[1].masks is None


def test_missing_files(coco_folder):
    with pytest.raises(UsageError, match=r"no annotation file .*instances_test\.json; beside it are instances_train"):
        coco.read_objects(coco_folder, ["test"], "mask_rcnn")


def test_parts_with_other_categories(read_changed, coco_folder, tmp_path):
    def change(content):
        content["categories"][0]["name"] = "ring"

    read_changed(change)
    shutil.copy(coco_folder / "annotations" / "instances_val.json", tmp_path / "annotations")
    shutil.copytree(coco_folder / "val", tmp_path / "val")
    with pytest.raises(UsageError, match=r"instances_val\.json: categories: they are not those of train"):
        coco.read_objects(tmp_path, ["train", "val"], "mask_rcnn")
