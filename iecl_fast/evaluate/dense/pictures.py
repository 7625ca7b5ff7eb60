"""predictions.png: a few test images, what is in them and what was found."""

import math
from contextlib import contextmanager

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.patches import Rectangle

from iecl_fast.engine.figures import drawable, png_figure
from iecl_fast.evaluate.dense.metrics import MASK_THRESHOLD
from iecl_fast.evaluate.dense.training import to_device
from iecl_fast.evaluate.dense.voc import UNLABELLED
from iecl_fast.evaluate.features import frozen

SHOWN = 6
SCORE = 0.5  # detections below are not drawn; where all are below, the best one is
MOST = 10  # detections drawn of an image
WIDTH = 2.4  # inches of an image
WHITE = (255, 255, 255)


def draw_detections(detector, images, classes, path, *, fabric, title=""):
    """Write a PNG file of test images: the objects in them above, and what the detector finds below.

    Args:
        detector: torchvision's, on the device of `fabric`.
        images: `DetectionImages` that are not for training.
        classes: names of the classes 1 .. n.
        path: the file.
        fabric: `lightning_fabric.Fabric`.
        title: above it.
    """
    shown = [images[index] for index in _spread(len(images))]
    pictures = [image for image, _ in shown]
    with frozen(detector), fabric.autocast():
        found = detector(to_device(pictures, fabric))
    with _panels(path, pictures, rows=("in the image", "found"), title=title) as (_, axes):
        for column, ((image, target), prediction) in enumerate(zip(shown, found)):
            prediction = {name: tensor.float().cpu() for name, tensor in prediction.items()}
            scores = prediction["scores"]  # the best comes first
            count = min(MOST, max(int((scores >= SCORE).sum()), min(1, len(scores))))
            prediction = {name: tensor[:count] for name, tensor in prediction.items()}
            if "masks" in prediction:
                prediction["masks"] = prediction["masks"][:, 0] > MASK_THRESHOLD
            for row, objects in enumerate((target, prediction)):
                axes[row][column].imshow(image.permute(1, 2, 0).numpy())
                _draw_objects(axes[row][column], objects, classes)


def draw_segmentations(segmenter, images, classes, path, *, fabric, title=""):
    """Write a PNG file of test images, their masks and the masks that are found, white where a mask has no class.

    Args: as `draw_detections`, with a segmenter and `SegmentationImages`.
    """
    shown = [images[index] for index in _spread(len(images))]
    mean, std = (np.array(values) for values in (images.mean, images.std))
    seen = set()
    rows = ("image", "mask", "found")
    with _panels(path, [image for image, _ in shown], rows=rows, title=title) as (figure, axes):
        for column, (image, mask) in enumerate(shown):
            with frozen(segmenter), fabric.autocast():
                found = segmenter(image[None].to(fabric.device))["out"].argmax(dim=1)[0].cpu()
            axes[0][column].imshow((image.permute(1, 2, 0).numpy() * std + mean).clip(0, 1))
            for row, values in enumerate((mask, found), start=1):
                axes[row][column].imshow(_colored(values))
                seen |= set(values.unique().tolist()) - {0, UNLABELLED}
        for label in sorted(seen):
            axes[0][0].plot([], [], "s", color=_color(label), label=drawable(classes[label - 1]))
        if seen:
            figure.legend(loc="outside lower center", ncols=8, fontsize=8)


def _draw_objects(axes, objects, classes):
    height, width = axes.images[0].get_size()
    for row, (box, label) in enumerate(zip(objects["boxes"].tolist(), objects["labels"].long().tolist())):
        left, upper, right, lower = box
        color, words = _color(label), drawable(classes[label - 1])
        if "scores" in objects:
            words += f" {objects['scores'][row]:.2f}"
        if "masks" in objects:
            mask = objects["masks"][row].bool().numpy()
            overlay = np.zeros((height, width, 4))
            overlay[mask] = (*color[:3], 0.3)
            axes.imshow(overlay)
            if mask.any() and not mask.all():
                axes.contour(mask, levels=[0.5], colors="white", linewidths=0.8)
        # Pixel i of a picture lies between i - 0.5 and i + 0.5.
        axes.add_patch(
            Rectangle((left - 0.5, upper - 0.5), right - left, lower - upper, fill=False, color=color, linewidth=1.5)
        )
        background = {"facecolor": color, "alpha": 0.8, "pad": 0.8, "edgecolor": "none"}
        axes.text(left, upper, words, fontsize=6, color="white", verticalalignment="bottom", bbox=background)
        if "keypoints" in objects:
            points = objects["keypoints"][row]
            points = points[points[:, 2] > 0]
            axes.plot(points[:, 0] - 0.5, points[:, 1] - 0.5, "o", color="white", markeredgecolor=color, markersize=4)


def _spread(count):
    """Indices of a few images, evenly over all."""
    return [index * count // min(SHOWN, count) for index in range(min(SHOWN, count))]


@contextmanager
def _panels(path, images, *, rows, title):
    """Context with a figure and its axes, a row for each of `rows` and a column for each image (3, H, W)."""
    tallest = max(image.shape[1] / image.shape[2] for image in images)
    size = (max(4.0, WIDTH * len(images) + 0.3), WIDTH * tallest * len(rows) + 0.7)
    with png_figure(path, size=size, dpi=max(100, math.ceil(800 / size[0]))) as figure:
        figure.suptitle(title, fontsize=10)
        axes = figure.subplots(len(rows), len(images), squeeze=False)
        for panel in axes.flat:
            panel.set_xticks([])
            panel.set_yticks([])
        for row, words in enumerate(rows):
            axes[row][0].set_ylabel(words)
        yield figure, axes


def _color(label):
    order = 2 * (label - 1) + (label - 1) // 10 % 2  # the ten dark ones first
    return colormaps["tab20"](order % 20)


def _colored(mask):
    """A mask (H, W) as a picture (H, W, 3) of uint8: black where there is background."""
    picture = torch.zeros(*mask.shape, 3, dtype=torch.uint8)
    for label in mask.unique().tolist():
        color = WHITE if label == UNLABELLED else [round(255 * part) for part in _color(label)[:3]]
        if label != 0:
            picture[mask == label] = torch.tensor(color, dtype=torch.uint8)
    return picture.numpy()
