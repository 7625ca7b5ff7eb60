"""What ``evaluate detect`` and ``evaluate segment`` can be told, as ``key=value``, and what they take otherwise."""

import dataclasses
import typing
from dataclasses import dataclass
from typing import Annotated, Literal

from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.schema import Range, convert, did_you_mean
from iecl_fast.engine.settings import Amount, Count, Positive, ScheduleConfig, Seed, Threads

Part = Annotated[float, Range(above=0, maximum=1)]
Above0 = Annotated[float, Range(above=0)]


@dataclass(frozen=True)
class DenseSettings:
    """What both tasks have in common.

    Attributes:
        train, test: lists of images. VOC: names of files in ImageSets, such as trainval, or VOC2007/trainval where the
            folder holds several years. COCO: names such as train2017. null takes the folder's own, see the readers.
        classes: names of the classes of a VOC folder, in the order of the values in its masks; null is VOC's twenty.
            COCO files name theirs.
        epochs: passes over the training images.
        batch_size: images of a step. Batch norm takes its statistics over all of them.
        lr: peak learning rate of SGD.
        momentum, weight_decay: of SGD; batch norm's scales and shifts do not decay.
        schedule: step, cosine or constant.
        drops: parts of the training after which step multiplies the rate by gamma.
        gamma: step only.
        warmup_epochs: linear rise from 0, before.
        batch_norm: train goes on training the backbone's batch norm and gives one to the new layers too; frozen leaves
            the backbone's statistics, scales and shifts as they are, and the new layers of R-CNN have none.
        flip: mirror every second training image.
        workers: processes that load images.
        precision: of the arithmetic; the weights stay float32.
        accelerator: auto is cuda where there is one, else cpu.
        threads: of the CPU's arithmetic; null leaves it to torch.
        seed: of the new layers, the order of the images and their random changes.
        log_steps: steps from one row of metrics.csv to the next.
        progress: show the progress bar.
    """

    train: tuple[str, ...] | None = None
    test: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None
    epochs: Positive = 24
    batch_size: Positive = 16
    lr: Above0 = 0.02
    momentum: Annotated[float, Range(minimum=0, maximum=1)] = 0.9
    weight_decay: Amount = 1e-4
    schedule: Literal["step", "cosine", "constant"] = "step"
    drops: tuple[Part, ...] = (0.75, 0.917)
    gamma: Part = 0.1
    warmup_epochs: Amount = 0.1
    batch_norm: Literal["train", "frozen"] = "train"
    flip: bool = True
    workers: Count = 0
    precision: Literal["32-true", "16-mixed", "bf16-mixed"] = "32-true"
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Threads | None = None
    seed: Seed = 0
    log_steps: Positive = 20
    progress: bool = True

    def rate_schedule(self):
        """The `ScheduleConfig` that `iecl_fast.engine.schedule.learning_rate` reads."""
        milestones = tuple(drop * self.epochs for drop in self.drops)
        return ScheduleConfig(self.schedule, self.warmup_epochs, milestones, self.gamma)


@dataclass(frozen=True)
class DetectSettings(DenseSettings):
    """Detection. The defaults are MoCo's for VOC (He et al., 2020, section 4.2), in epochs.

    Attributes:
        model: faster_rcnn finds boxes, mask_rcnn also the objects' masks, keypoint_rcnn a person's keypoints.
        features: fpn pools from a pyramid over all stages; c4 from the third, the fourth is the head (not for
            keypoint_rcnn).
        min_size: lengths in pixels, one of which, drawn at random, the shorter side of a training image gets; the last
            one is that of the test images.
        max_size: the longer side is at most this.
        fpn_channels: of the pyramid and of the heads' convolutions (keypoint_rcnn: twice that); with c4 only of the
            mask predictor.
        head_units: of the fully connected layer of fpn's box head.
        rois_per_image: proposals on which the box head learns.
    """

    model: Literal["faster_rcnn", "mask_rcnn", "keypoint_rcnn"] = "faster_rcnn"
    features: Literal["fpn", "c4"] = "fpn"
    min_size: tuple[Positive, ...] = (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
    max_size: Positive = 1333
    fpn_channels: Positive = 256
    head_units: Positive = 1024
    rois_per_image: Positive = 512


@dataclass(frozen=True)
class SegmentSettings(DenseSettings):
    """Segmentation. Schedule and crops are MoCo's for VOC (He et al., 2020, appendix), in epochs.

    Attributes:
        crop_size: side in pixels of the training crops.
        scale: least and greatest factor by which a training image is resized before.
        output_stride: pixels of an image for one of the features; dilation takes the place of the strides beyond it.
    """

    epochs: Positive = 45
    lr: Above0 = 0.003
    drops: tuple[Part, ...] = (0.7, 0.9)
    warmup_epochs: Amount = 0.0
    crop_size: Positive = 513
    scale: tuple[Above0, Above0] = (0.5, 2.0)
    output_stride: Literal[8, 16, 32] = 16


SETTINGS = {"detect": DetectSettings, "segment": SegmentSettings}

# Detectron's 1x schedule of 90,000 steps of 16 images: 12 epochs of COCO.
COCO_DEFAULTS = {
    "model": "mask_rcnn",
    "epochs": 12,
    "drops": (0.667, 0.889),
    "warmup_epochs": 0.14,
    "min_size": (640, 672, 704, 736, 768, 800),
}


def resolve_settings(task, layout, overrides):
    """The settings of a task, those given over the defaults for the layout of its data.

    Args:
        task: "detect" or "segment".
        layout: "voc" or "coco".
        overrides: dict from key to value, as YAML gives them.

    Raises:
        UsageError: an unknown key, with the nearest known one; a value that its key does not allow; values that do not
            go together.
    """
    cls = SETTINGS[task]
    hints = typing.get_type_hints(cls, include_extras=True)
    for key in overrides:
        if key not in hints:
            raise UsageError(f"there is no key {key} of evaluate {task}{did_you_mean(key, hints)}")
    values = (COCO_DEFAULTS if layout == "coco" else {}) | overrides
    settings = cls(**{key: convert(value, hints[key], key) for key, value in values.items()})
    _check_together(settings, layout)
    return settings


def describe_settings(task):
    """A line ``key=value`` for each default of a task, those for VOC."""
    return [f"{field.name}={_as_yaml(field.default)}" for field in dataclasses.fields(SETTINGS[task])]


def _as_yaml(value):
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _check_together(settings, layout):
    """What a single value cannot tell."""
    if settings.warmup_epochs >= settings.epochs:
        raise UsageError(
            f"warmup_epochs: {settings.warmup_epochs} is not allowed, it must be below epochs={settings.epochs}"
        )
    for key in ("train", "test", "classes", "min_size"):
        if getattr(settings, key, None) == ():
            raise UsageError(f"{key}: [] is not allowed, it must hold at least one")
    if settings.classes is not None and len(set(settings.classes)) < len(settings.classes):
        raise UsageError(f"classes: {list(settings.classes)} is not allowed, no name may come twice")
    if isinstance(settings, SegmentSettings):
        _check_segmentation(settings)
    else:
        _check_detection(settings, layout)


def _check_segmentation(settings):
    if settings.scale[0] > settings.scale[1]:
        raise UsageError(f"scale: {list(settings.scale)} is not allowed, the first must not be above the second")
    if settings.batch_size < 2:
        raise UsageError("batch_size: 1 is not allowed, DeepLab's pooled branch needs at least 2 images (batch norm)")


def _check_detection(settings, layout):
    if max(settings.min_size) > settings.max_size:
        raise UsageError(
            f"min_size: {list(settings.min_size)} is not allowed, none may be above max_size={settings.max_size}"
        )
    if settings.model != "faster_rcnn" and layout == "voc":
        raise UsageError(f"model: {settings.model} is not allowed, a VOC folder has boxes alone: take faster_rcnn")
    if settings.model == "keypoint_rcnn" and settings.features == "c4":
        raise UsageError("features: c4 is not allowed with keypoint_rcnn, whose head is defined on fpn alone")
    if settings.classes is not None and layout == "coco":
        raise UsageError("classes: not allowed for a COCO folder, its files name the classes")
