"""``evaluate detect|segment``: from a checkpoint and annotated images to a trained network and its figures."""

import dataclasses
import time
from datetime import datetime
from pathlib import Path

from lightning_fabric import Fabric, seed_everything

from iecl_fast.engine import build
from iecl_fast.engine.checkpoint import load_checkpoint
from iecl_fast.engine.curves import draw_curves
from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.figures import drawable
from iecl_fast.engine.folder import RunFolder, check_writable, write_json
from iecl_fast.engine.logging import RunLog
from iecl_fast.evaluate.dense import coco, voc
from iecl_fast.evaluate.dense.annotations import check_readable
from iecl_fast.evaluate.dense.backbone import Stillness
from iecl_fast.evaluate.dense.datasets import DetectionImages, SegmentationImages, as_lists
from iecl_fast.evaluate.dense.deeplab import build_segmenter
from iecl_fast.evaluate.dense.metrics import DetectionMetric, SegmentationMetric
from iecl_fast.evaluate.dense.pictures import draw_detections, draw_segmentations
from iecl_fast.evaluate.dense.rcnn import build_detector
from iecl_fast.evaluate.dense.settings import resolve_settings
from iecl_fast.evaluate.dense.training import (
    Training,
    detection_losses,
    measure_detector,
    measure_segmenter,
    segmentation_losses,
)
from iecl_fast.evaluate.restore import checkpoint_path, plain_resnet

PREDICTIONS = "predictions.png"


def evaluate_dense(task, checkpoint, data, *, freeze=False, output=None, overrides=None):
    """Train a detector or a segmenter around a checkpoint's backbone and measure it.

    The folder gets ``result.json``, ``metrics.csv`` and ``curves.png`` of the training, and ``predictions.png``.

    Args:
        task: "detect" or "segment".
        checkpoint: a checkpoint file, or a run folder.
        data: folder in VOC's or COCO's format.
        freeze: leave the backbone as it is, parameters and buffers, and train the rest.
        output: a new folder; None makes one under runs.
        overrides: dict of settings, see `DenseSettings`.

    Returns:
        (the folder's `Path`, the dict that its result.json holds).

    Raises:
        UsageError: no checkpoint, another one's weights, annotations that cannot be used, settings that do not fit.
        RunError: the loss is no number any more, an image cannot be read.
    """
    started = time.perf_counter()
    data = Path(data)
    layout = _layout(task, data)
    settings = resolve_settings(task, layout, overrides or {})
    output = output or f"runs/{task}-{data.resolve().name}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = RunFolder.for_new_run(output)
    check_writable(folder.path)
    path = checkpoint_path(checkpoint)
    state = load_checkpoint(path)
    backbone, config = plain_resnet(state, path)
    mean, std = config.views["mean"], config.views["std"]
    try:
        fabric = Fabric(accelerator=build.accelerator(settings), devices=1, precision=settings.precision)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"accelerator, precision: {' '.join(str(error).split())}") from None
    train, test, lists = _read(task, layout, data, settings)
    _check_test(task, test)

    with build.threads(settings):
        seed_everything(settings.seed, verbose=False)
        stillness = Stillness(backbone, freeze=freeze, batch_norm=settings.batch_norm)
        work = WORK[task](backbone, train, test, settings, mean, std, fabric)
        training = Training(
            fabric, work.network, work.losses, work.images, collate=work.collate, settings=settings, stillness=stillness
        )
        folder.path.mkdir(parents=True, exist_ok=True)
        _train(training, folder, settings)
        measured = work.measure()
        title = f"{work.name} on {drawable(data.resolve().name)}, {settings.epochs} epochs"
        work.draw(folder.path / PREDICTIONS, title)
    draw_curves(folder.metrics, folder.curves, title)
    result = {
        "task": task,
        "model": work.name,
        "data": str(data.resolve()),
        "checkpoint": str(path),
        "step": state["step"],
        "freeze": freeze,
        **measured,
        "train_images": len(work.images),
        "test_images": len(test.images),
        "left_out": train.left_out + test.left_out,
        "steps": training.total_steps,
        "settings": _plain(dataclasses.asdict(settings) | lists | {"classes": train.classes}),
        "seconds": time.perf_counter() - started,
    }
    write_json(folder.result, result)
    return folder.path, result


def _layout(task, data):
    """The format of a folder, "voc" or "coco"."""
    if not data.is_dir():
        raise UsageError(f"--data: there is no folder {data}")
    if voc.is_voc(data):
        return "voc"
    if task == "detect" and coco.is_coco(data):
        return "coco"
    what = "ImageSets (VOC) nor annotations/*.json (COCO)" if task == "detect" else "ImageSets (VOC)"
    raise UsageError(f"--data: {data} has {'neither' if task == 'detect' else 'no'} {what}")


def _read(task, layout, data, settings):
    """The annotated images for training and for testing, and the names of the lists that were read."""
    if layout == "coco":
        train, test = coco.default_lists(data, settings.model)
    else:
        train, test = voc.default_lists(data, task)
    lists = {"train": settings.train or train, "test": settings.test or test}

    def read(names):
        if layout == "coco":
            return coco.read_objects(data, names, settings.model)
        reader = voc.read_boxes if task == "detect" else voc.read_masks
        return reader(data, names, settings.classes)

    parts = [read(names) for names in lists.values()]
    if parts[0].classes != parts[1].classes or parts[0].keypoint_names != parts[1].keypoint_names:
        test, train = (", ".join(lists[part]) for part in ("test", "train"))
        raise UsageError(f"--data: the categories of {test} are not those of {train}")
    return *parts, lists


def _check_test(task, test):
    """There is something to be found in the test images, and all of them can be read."""
    if task == "segment":
        there = any(teaches for *_, teaches in test.images)
        files = [image for image, *_ in test.images]
    else:
        there = any(not ignored for objects in test.images for ignored in objects.ignored)
        files = [objects.image for objects in test.images]
    if not there:
        what = "a pixel with a class" if task == "segment" else "an object that is neither difficult nor a crowd"
        raise UsageError(f"test: none of the {len(files)} images has {what}: there is nothing to measure")
    check_readable(files)


def _train(training, folder, settings):
    with RunLog(
        folder,
        step=0,
        total_steps=training.total_steps,
        images_per_step=min(settings.batch_size, len(training.images)),
        progress=settings.progress,
    ) as log:
        training.run(log)


class _Detection:
    """What is particular to detection: the detector, its images and what is made of both."""

    losses = staticmethod(detection_losses)
    collate = staticmethod(as_lists)

    def __init__(self, backbone, train, test, settings, mean, std, fabric):
        self.settings, self.fabric, self.classes = settings, fabric, test.classes
        self.name = f"{settings.model} {settings.features}"
        self.images = DetectionImages(train, training=True, flip=settings.flip, seed=settings.seed)
        self.test_images = DetectionImages(test, training=False)
        self.network = build_detector(
            backbone,
            settings=settings,
            num_classes=len(train.classes),
            num_keypoints=len(train.keypoint_names or ()),
            mean=mean,
            std=std,
        )

    def measure(self):
        metric = DetectionMetric(self.settings.model, self.classes)
        loading = {"batch_size": self.settings.batch_size, "workers": self.settings.workers}
        return measure_detector(self.network, self.test_images, metric, fabric=self.fabric, **loading)

    def draw(self, path, title):
        draw_detections(self.network, self.test_images, self.classes, path, fabric=self.fabric, title=title)


class _Segmentation:
    """The same for segmentation."""

    losses = staticmethod(segmentation_losses)
    collate = None
    name = "deeplabv3"

    def __init__(self, backbone, train, test, settings, mean, std, fabric):
        self.settings, self.fabric, self.classes = settings, fabric, test.classes
        crops = {"crop_size": settings.crop_size, "scale": settings.scale, "flip": settings.flip, "seed": settings.seed}
        self.images = SegmentationImages(train, mean=mean, std=std, **crops)
        self.test_images = SegmentationImages(test, mean=mean, std=std)
        self.network = build_segmenter(backbone, output_stride=settings.output_stride, num_classes=len(train.classes))

    def measure(self):
        metric = SegmentationMetric(self.classes, self.fabric.device)
        workers = self.settings.workers
        return measure_segmenter(self.network, self.test_images, metric, fabric=self.fabric, workers=workers)

    def draw(self, path, title):
        draw_segmentations(self.network, self.test_images, self.classes, path, fabric=self.fabric, title=title)


WORK = {"detect": _Detection, "segment": _Segmentation}


def _plain(values):
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
