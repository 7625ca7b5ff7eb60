"""Detectors and segmenters around a backbone: their parts, a short training of each, and what stops one."""

import math

import pytest
import torch
from lightning_fabric import Fabric
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dense import shapes
from iecl_fast.engine.errors import RunError, UsageError
from iecl_fast.evaluate.dense import coco, rcnn, voc
from iecl_fast.evaluate.dense.annotations import Annotated
from iecl_fast.evaluate.dense.backbone import Stillness
from iecl_fast.evaluate.dense.datasets import DetectionImages, SegmentationImages, as_lists
from iecl_fast.evaluate.dense.deeplab import build_segmenter
from iecl_fast.evaluate.dense.metrics import DetectionMetric, SegmentationMetric
from iecl_fast.evaluate.dense.rcnn import build_detector
from iecl_fast.evaluate.dense.settings import resolve_settings
from iecl_fast.evaluate.dense.training import (
    Training,
    detection_losses,
    measure_detector,
    measure_segmenter,
    segmentation_losses,
)
from iecl_fast.ssl import build_backbone

STANDARDISED = {"mean": (0.45, 0.45, 0.45), "std": (0.25, 0.25, 0.25)}
SMALL = {
    "fpn_channels": 16,
    "head_units": 32,
    "rois_per_image": 32,
    "min_size": [64],
    "batch_size": 4,
    "epochs": 12,
    "log_steps": 1,
}


class Log:
    """Keeps the rows that a training writes."""

    def __init__(self):
        self.rows, self.advanced = [], 0

    def write(self, step, epoch, rate, values):
        self.rows.append({"step": step, "epoch": epoch, "rate": rate, **values})

    def advance(self):
        self.advanced += 1


class Detection:
    """A small detector with its images."""

    def __init__(self, folder, fabric, layout, freeze=False, **settings):
        self.fabric = fabric
        self.settings = resolve_settings("detect", layout, SMALL | settings)
        torch.manual_seed(0)
        self.backbone = build_backbone("resnet18", "imagenet", 8)
        self.stillness = Stillness(self.backbone, freeze=freeze, batch_norm=self.settings.batch_norm)
        if layout == "voc":
            train, test = (voc.read_boxes(folder, [name], shapes.CLASSES) for name in ("trainval", "test"))
        else:
            train, test = (coco.read_objects(folder, [name], self.settings.model) for name in ("train", "val"))
        self.images, self.test_images = (DetectionImages(part, training=part is train) for part in (train, test))
        points = len(train.keypoint_names or ())
        self.network = build_detector(
            self.backbone, settings=self.settings, num_classes=2, num_keypoints=points, **STANDARDISED
        )

    def train(self):
        return rows_of_training(self, detection_losses, as_lists)

    def measure(self):
        metric = DetectionMetric(self.settings.model, shapes.CLASSES)
        return measure_detector(self.network, self.test_images, metric, fabric=self.fabric, batch_size=3)


class Segmentation:
    """A small segmenter with its images."""

    def __init__(self, folder, fabric, freeze=False, **settings):
        self.fabric = fabric
        options = {"crop_size": 64, "batch_size": 4, "epochs": 12, "lr": 0.05, "log_steps": 1, "scale": [1, 1]}
        self.settings = resolve_settings("segment", "voc", options | settings)
        torch.manual_seed(0)
        self.backbone = build_backbone("resnet18", "imagenet", 8)
        self.stillness = Stillness(self.backbone, freeze=freeze, batch_norm=self.settings.batch_norm)
        train, test = (voc.read_masks(folder, [name], shapes.CLASSES) for name in ("train", "val"))
        self.images = SegmentationImages(train, **STANDARDISED, crop_size=64)
        self.test_images = SegmentationImages(test, **STANDARDISED)
        self.network = build_segmenter(self.backbone, output_stride=8, num_classes=2)

    def train(self):
        return rows_of_training(self, segmentation_losses, None)

    def measure(self):
        metric = SegmentationMetric(shapes.CLASSES, self.fabric.device)
        return measure_segmenter(self.network, self.test_images, metric, fabric=self.fabric)


def rows_of_training(work, losses, collate):
    """Train a detector or segmenter and give the rows of its log."""
    training = Training(
        work.fabric,
        work.network,
        losses,
        work.images,
        collate=collate,
        settings=work.settings,
        stillness=work.stillness,
    )
    log = Log()
    training.run(log)
    return log.rows


def assert_loss_falls(rows):
    losses = [row["loss"] for row in rows]
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6])


@pytest.mark.parametrize(
    ("layout", "settings", "figures"),
    [
        ("voc", {"model": "faster_rcnn"}, ("box_map50",)),
        ("voc", {"model": "faster_rcnn", "features": "c4"}, ("box_map50",)),
        ("coco", {"model": "mask_rcnn"}, ("box_map50", "mask_map50")),
        ("coco", {"model": "keypoint_rcnn"}, ("box_map50", "keypoint_map50")),
    ],
)
def test_a_short_training_of_a_detector(voc_folder, coco_folder, fabric, monkeypatch, layout, settings, figures):
    # Eight of them in a row, without batch norm, begin to learn only after a while.
    monkeypatch.setattr(rcnn, "KEYPOINT_CONVOLUTIONS", 2)
    work = Detection(voc_folder if layout == "voc" else coco_folder, fabric, layout, **settings)
    before = work.measure()
    rows = work.train()
    after = work.measure()
    assert [row["step"] for row in rows] == list(range(1, 37))
    assert [row["epoch"] for row in rows] == [epoch for epoch in range(1, 13) for _ in range(3)]
    assert_loss_falls(rows)
    for figure in figures:
        assert after[figure] > before[figure] + 0.05, (before, after)


def test_a_short_training_of_a_segmenter(voc_folder, fabric):
    work = Segmentation(voc_folder, fabric)
    before = work.measure()
    rows = work.train()
    assert_loss_falls(rows)
    after = work.measure()
    assert after["miou"] > before["miou"] + 0.1, (before, after)


@pytest.mark.parametrize("features", ["fpn", "c4"])
def test_a_frozen_backbone_is_not_moved_by_detection(coco_folder, fabric, features):
    work = Detection(coco_folder, fabric, "coco", freeze=True, features=features, epochs=1)
    before = {name: tensor.clone() for name, tensor in work.backbone.state_dict().items()}
    head = {name: tensor.clone() for name, tensor in work.network.roi_heads.mask_predictor.state_dict().items()}
    work.train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in work.backbone.state_dict().items())
    after = work.network.roi_heads.mask_predictor.state_dict()
    assert not any(torch.equal(tensor, head[name]) for name, tensor in after.items())


def test_a_frozen_backbone_is_not_moved_by_segmentation(voc_folder, fabric):
    work = Segmentation(voc_folder, fabric, freeze=True, epochs=1)
    before = {name: tensor.clone() for name, tensor in work.backbone.state_dict().items()}
    work.train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in work.backbone.state_dict().items())


def test_frozen_batch_norm_stays_and_the_rest_moves(voc_folder, fabric):
    work = Detection(voc_folder, fabric, "voc", batch_norm="frozen", epochs=1)
    before = {name: tensor.clone() for name, tensor in work.backbone.state_dict().items()}
    work.train()
    moved = {name for name, tensor in work.backbone.state_dict().items() if not torch.equal(tensor, before[name])}
    norms = {name for name, module in work.backbone.named_modules() if isinstance(module, _BatchNorm)}
    assert moved
    assert not any(name.rpartition(".")[0] in norms for name in moved)


@pytest.mark.parametrize("batch_norm", ["train", "frozen"])
@pytest.mark.parametrize(("model", "features"), [("mask_rcnn", "fpn"), ("mask_rcnn", "c4"), ("faster_rcnn", "c4")])
def test_new_layers_have_batch_norm_where_the_backbone_s_is_trained(coco_folder, fabric, model, features, batch_norm):
    work = Detection(coco_folder, fabric, "coco", model=model, features=features, batch_norm=batch_norm)
    own = set(work.backbone.modules())
    new = [module for module in work.network.modules() if isinstance(module, _BatchNorm) and module not in own]
    # The pyramid has 8 convolutions, the box head 4 and the mask head 4; after the fourth stage there is one.
    expected = {"fpn": 8 + 4 + 4, "c4": 1}[features]
    assert len(new) == (expected if batch_norm == "train" else 0)


def test_the_fourth_stage_is_the_head_of_c4(coco_folder, fabric):
    work = Detection(coco_folder, fabric, "coco", features="c4")
    heads = work.network.roi_heads
    assert work.backbone.layer4 in set(heads.box_head.modules())
    assert work.backbone.layer4 in set(heads.mask_head.modules())
    assert work.network.backbone.out_channels == 32
    assert heads.box_predictor.cls_score.in_features == 64
    rois = torch.randn(5, 32, 14, 14)
    work.network.eval()
    assert heads.box_head(rois).shape == (5, 64)
    assert heads.mask_predictor(heads.mask_head(rois)).shape == (5, 3, 14, 14)


@pytest.mark.parametrize(("stem", "strides"), [("imagenet", [4, 8, 16, 32, 64]), ("small", [1, 2, 4, 8, 16])])
def test_anchors_follow_the_strides(stem, strides):
    settings = resolve_settings("detect", "voc", SMALL)
    backbone = build_backbone("resnet18", stem, 4)
    detector = build_detector(backbone, settings=settings, num_classes=2, num_keypoints=0, **STANDARDISED)
    assert detector.rpn.anchor_generator.sizes == tuple((8 * stride,) for stride in strides)
    detector.eval()
    features = detector.backbone(torch.zeros(1, 3, 64, 64))
    # The last map of the backbone is sampled once more.
    assert [64 // feature.shape[-1] for feature in features.values()] == strides
    assert all(feature.shape[1] == 16 for feature in features.values())


def test_mixed_precision_leaves_the_boxes_as_they_are(coco_folder):
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    work = Detection(coco_folder, fabric, "coco", epochs=1)
    seen = []
    work.network.transform.register_forward_pre_hook(lambda module, inputs: seen.extend(inputs[1] or ()))
    rows = work.train()
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert {target["boxes"].dtype for target in seen} == {torch.float32}
    assert work.measure()["box_map"] >= 0


def test_batch_norm_does_not_decay(voc_folder, fabric):
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    settings = resolve_settings("segment", "voc", {"weight_decay": 0.3})
    images = voc.read_masks(voc_folder, ["train"], shapes.CLASSES).images
    stillness = Stillness(network, freeze=False, batch_norm="train")
    training = Training(fabric, network, None, images, collate=None, settings=settings, stillness=stillness)
    decays = {
        id(parameter): group["weight_decay"]
        for group in training.optimizer.param_groups
        for parameter in group["params"]
    }
    assert [decays[id(parameter)] for parameter in network.parameters()] == [0.3, 0.3, 0.0, 0.0]


def test_the_rate_rises_and_drops(voc_folder, fabric):
    work = Segmentation(
        voc_folder, fabric, epochs=4, lr=0.01, warmup_epochs=1, drops=[0.5, 0.75], gamma=0.1, batch_size=6
    )
    rates = [row["rate"] for row in work.train()]
    assert rates == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.01, 0.001, 0.001, 0.0001, 0.0001])


def test_the_same_seed_gives_the_same_losses(voc_folder, fabric):
    losses = []
    for _ in range(2):
        work = Segmentation(voc_folder, fabric, epochs=1)
        torch.manual_seed(5)
        losses.append([row["loss"] for row in work.train()])
    assert losses[0] == losses[1]


class Diverging(nn.Module):
    """Its loss is no number from the second step on."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        return self.weight.sum() * (1.0 if self.calls == 1 else math.nan)


@pytest.mark.parametrize("log_steps", [1, 100])
def test_a_loss_that_is_no_number_stops_with_the_step(voc_folder, fabric, log_steps):
    settings = resolve_settings("segment", "voc", {"epochs": 1, "batch_size": 4, "log_steps": log_steps})
    images = SegmentationImages(voc.read_masks(voc_folder, ["train"], shapes.CLASSES), **STANDARDISED, crop_size=32)

    def losses(network, images, masks):
        return {"good": images.sum() * 0 + 2, "bad": network(images)}

    network = Diverging()
    stillness = Stillness(network, freeze=False, batch_norm="train")
    training = Training(fabric, network, losses, images, collate=None, settings=settings, stillness=stillness)
    with pytest.raises(RunError, match=r"no number at step 2 of 3 \(loss nan, good 2.0, bad nan\).* lr below 0.003"):
        training.run(Log())


def test_pixels_without_a_class_have_no_loss():
    class Constant(nn.Module):
        def forward(self, images):
            return {"out": images}

    scores = torch.randn(1, 3, 2, 2, requires_grad=True)
    masks = torch.tensor([[[0, 255], [255, 2]]])
    loss = segmentation_losses(Constant(), scores, masks)["cross_entropy"]
    log = scores.log_softmax(dim=1)
    torch.testing.assert_close(loss, -(log[0, 0, 0, 0] + log[0, 2, 1, 1]) / 2)
    assert segmentation_losses(Constant(), scores, torch.full_like(masks, 255))["cross_entropy"] == 0


def test_too_few_images(voc_folder, fabric):
    annotated = voc.read_boxes(voc_folder, ["trainval"], shapes.CLASSES)
    images = DetectionImages(Annotated(annotated.images[:1], shapes.CLASSES), training=True)
    network = nn.Linear(1, 1)
    stillness = Stillness(network, freeze=False, batch_norm="train")
    settings = resolve_settings("detect", "voc", SMALL)
    with pytest.raises(UsageError, match="train: there are 1 images with something to learn"):
        Training(fabric, network, detection_losses, images, collate=as_lists, settings=settings, stillness=stillness)
