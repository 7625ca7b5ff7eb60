"""Average precision and intersection over union of cases that are worked out by hand."""

import pytest
import torch

from iecl_fast.evaluate.dense.metrics import DetectionMetric, KeypointPrecision, SegmentationMetric


def found(boxes, scores, labels=None, **more):
    labels = [1] * len(scores) if labels is None else labels
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "scores": torch.tensor(scores, dtype=torch.float32),
        "labels": torch.tensor(labels, dtype=torch.int64),
        **more,
    }


def there(boxes, labels=None, ignored=None, **more):
    boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    sides = boxes[:, 2:] - boxes[:, :2]
    return {
        "boxes": boxes,
        "labels": torch.tensor([1] * len(boxes) if labels is None else labels, dtype=torch.int64),
        "iscrowd": torch.tensor([0] * len(boxes) if ignored is None else ignored, dtype=torch.int64),
        "area": sides.prod(dim=1),
        **more,
    }


def measured(predictions, targets, model="faster_rcnn", classes=("disc", "square")):
    metric = DetectionMetric(model, classes)
    for prediction, target in zip(predictions, targets):
        metric.update([prediction], [target])
    return metric.compute()


BOXES = [[0, 0, 10, 10], [20, 20, 40, 40]]


def test_everything_found_and_nothing_else():
    result = measured([found(BOXES, [0.9, 0.8], [1, 2])], [there(BOXES, [1, 2])])
    assert (result["box_map"], result["box_map50"], result["box_map75"]) == pytest.approx((1, 1, 1))
    assert result["box_map_per_class"] == pytest.approx({"disc": 1, "square": 1})


def test_a_wrong_detection_between_two_right_ones():
    # Precision after each: 1, 1/2, 2/3; recall: 1/2, 1/2, 1. So 1 at the recalls 0.00 .. 0.50, 2/3 at 0.51 .. 1.00.
    detections = [BOXES[0], [60, 0, 70, 10], BOXES[1]]
    result = measured([found(detections, [0.9, 0.8, 0.7])], [there(BOXES)])
    expected = (51 * 1 + 50 * 2 / 3) / 101
    assert (result["box_map"], result["box_map50"]) == pytest.approx((expected, expected))


def test_an_overlap_of_062_counts_at_three_of_ten_thresholds():
    result = measured([found([[0, 0, 10, 6.2]], [0.9])], [there([[0, 0, 10, 10]])])
    assert (result["box_map"], result["box_map50"], result["box_map75"]) == pytest.approx((0.3, 1, 0))


def test_one_of_two_images_is_missed():
    # Recall ends at 1/2: precision 1 at 51 of 101 recalls.
    result = measured([found([BOXES[0]], [0.9]), found([], [])], [there([BOXES[0]]), there([BOXES[0]])])
    assert result["box_map"] == pytest.approx(51 / 101)


@pytest.mark.parametrize("ignored", [[1, 0], [0, 0]])
def test_an_ignored_object_counts_neither_way(ignored):
    result = measured([found(BOXES, [0.9, 0.8])], [there(BOXES, ignored=ignored)])
    assert result["box_map"] == pytest.approx(1)
    missed = measured([found(BOXES[1:], [0.8])], [there(BOXES, ignored=ignored)])
    assert missed["box_map"] == pytest.approx(1 if ignored[0] else 51 / 101)


def test_the_wrong_class_is_not_found():
    result = measured([found([BOXES[0]], [0.9], [2])], [there([BOXES[0]], [1])])
    assert result["box_map"] == pytest.approx(0)
    assert result["box_map_per_class"]["disc"] == pytest.approx(0)


def test_without_objects_there_is_no_value():
    result = measured([found([BOXES[0]], [0.9])], [there([])])
    assert result["box_map"] is None


def test_masks_are_measured_by_their_own_overlap():
    mask = torch.zeros(1, 16, 16, dtype=torch.uint8)
    mask[:, :10, :10] = 1
    part = mask.float()[:, None] * 0.9
    part[..., 6:10, :10] = 0.2  # below one half
    part[..., 6, :2] = 0.6  # 62 of 100 pixels
    prediction = found([[0, 0, 10, 10]], [0.9], masks=part)
    result = measured([prediction], [there([[0, 0, 10, 10]], masks=mask)], "mask_rcnn")
    assert result["box_map"] == pytest.approx(1)
    assert (result["mask_map"], result["mask_map50"], result["mask_map75"]) == pytest.approx((0.3, 1, 0))


def keypoint_result(points, moved):
    metric = KeypointPrecision()
    points = torch.tensor([points], dtype=torch.float32)
    box = [[0, 0, 20, 20]]  # 400 square pixels
    prediction = found(box, [0.9], keypoints=points + torch.tensor([moved, 0.0, 0.0]))
    metric.update([prediction], [there(box, keypoints=points)])
    return metric.compute()


@pytest.mark.parametrize("moved", [0.0, 2.0])
def test_keypoints_of_other_data(moved):
    # exp(-d^2 / (2 * 400 * (2 * 0.05)^2)) is 0.607 for d = 2: three of ten thresholds.
    result = keypoint_result([[5, 5, 2], [10, 5, 1], [15, 5, 2], [0, 0, 0]], moved)
    expected = (1, 1, 1) if moved == 0 else (0.3, 1, 0)
    assert tuple(result.values()) == pytest.approx(expected)


def test_keypoints_of_coco_have_coco_s_constants():
    # Only the nose is there, whose constant is 0.026: exp(-1.04^2 / (2 * 400 * 0.052^2)) is again 0.607.
    points = [[10, 10, 2]] + [[0, 0, 0]] * 16
    assert keypoint_result(points, 1.04)["keypoint_map"] == pytest.approx(0.3)


def test_no_keypoints_found_or_none_to_find():
    metric = KeypointPrecision()
    points = torch.tensor([[[5.0, 5.0, 2.0]]])
    metric.update([found([], [], keypoints=points[:0])], [there(BOXES[:1], keypoints=points)])
    assert metric.compute()["keypoint_map"] == 0
    empty = KeypointPrecision()
    empty.update([found([], [], keypoints=points[:0])], [there([], keypoints=points[:0])])
    assert empty.compute()["keypoint_map"] is None


def test_mean_iou_by_hand():
    truth = torch.tensor([[[0, 0, 1], [1, 2, 255]]])
    guess = torch.tensor([[[0, 1, 1], [1, 1, 0]]])
    scores = torch.nn.functional.one_hot(guess, 4).permute(0, 3, 1, 2).float()
    metric = SegmentationMetric(("a", "b", "c"), torch.device("cpu"))
    metric.update(scores, truth)
    # background: 1 of 2; a: 2 of 4; b: 0 of 1; c is nowhere. Of 5 pixels with a class 3 are right.
    result = metric.compute()
    assert result["iou_per_class"] == pytest.approx({"background": 0.5, "a": 0.5, "b": 0.0})
    assert result["miou"] == pytest.approx(1 / 3)
    assert result["pixel_accuracy"] == pytest.approx(3 / 5)


def test_mean_iou_is_over_all_images_together():
    metric = SegmentationMetric(("a",), torch.device("cpu"))
    for truth, guess in (([0, 0, 0, 1], [0, 0, 0, 1]), ([1, 1, 1, 1], [0, 0, 1, 1])):
        scores = torch.nn.functional.one_hot(torch.tensor([[guess]]), 2).permute(0, 3, 1, 2).float()
        metric.update(scores, torch.tensor([[truth]]))
    # background: 3 of 5; a: 3 of 5.
    assert metric.compute()["miou"] == pytest.approx(0.6)


def test_masks_without_any_class_have_no_value():
    metric = SegmentationMetric(("a",), torch.device("cpu"))
    metric.update(torch.zeros(1, 2, 2, 2), torch.full((1, 2, 2), 255))
    assert metric.compute()["miou"] is None
