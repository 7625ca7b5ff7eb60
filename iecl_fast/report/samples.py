"""What encoders make of sample images: features of some test images, and their neighbours among training images."""

from dataclasses import dataclass, replace

import torch
from lightning_fabric import Fabric
from torch.nn import functional
from torch.utils.data import Dataset, Subset

from iecl_fast.data import balanced_rows
from iecl_fast.engine import build
from iecl_fast.engine.config import resolve
from iecl_fast.engine.faults import Faults
from iecl_fast.evaluate.features import extract_features
from iecl_fast.evaluate.restore import checkpoint_path, load_trained, restore_method

TESTS = 1000  # test images, at most
GALLERY = 4000  # training images among which neighbours are looked for, at most
CLASSES = 20  # of which test images are taken, at most: more colours nobody tells apart
QUERIES = 10
NEIGHBOURS = 8


@dataclass
class Look:
    """Features of sample images by one run's encoder.

    The images depend on the data alone, so that runs on the same data look at the same ones.

    Attributes:
        step: of the checkpoint.
        classes: names of all classes.
        tests, gallery: `Subset` of `LabelledImages`, test images and training images.
        test_labels, gallery_labels: (n,), (m,) int64 on the CPU.
        test_features, gallery_features: (n, C), (m, C) float32, unit rows on the CPU.
        total_tests, total_gallery: how many images there are of which these are some.
        unreadable: what was wrong with each image that cannot be read, and is none of these.
    """

    step: int
    classes: list
    tests: Subset
    gallery: Subset
    test_labels: torch.Tensor
    gallery_labels: torch.Tensor
    test_features: torch.Tensor
    gallery_features: torch.Tensor
    total_tests: int
    total_gallery: int
    unreadable: list


@dataclass
class Neighbours:
    """The nearest training images of a few test images.

    Attributes:
        queries: (q,) int64, places in `Look.tests`, one for each class as far as `QUERIES` reach.
        places: (q, k) int64 in `Look.gallery`, nearest first.
        similarities: (q, k) float32, cosines.
    """

    queries: torch.Tensor
    places: torch.Tensor
    similarities: torch.Tensor


def look(checkpoint):
    """Compute the features of the sample images.

    Args:
        checkpoint: file, or run folder.

    Returns:
        `Look`.

    Raises:
        UsageError: no checkpoint, a damaged one, or its data is not there.
        RunError: more images cannot be read than the run allows, or a feature is no finite number.
    """
    path = checkpoint_path(checkpoint)
    state = load_trained(path)
    # Of how the run was evaluated this needs the batches alone, so that a checkpoint from before a protocol will do.
    evaluate = {"batch_size": state["config"]["evaluate"]["batch_size"]}
    config = resolve(state["config"] | {"evaluate": evaluate})
    # The run's own accelerator need not be here.
    fabric = Fabric(accelerator=build.accelerator(replace(config.trainer, accelerator="auto")), devices=1)
    backbone = restore_method(state, config, path).backbone.to(fabric.device)
    train, test, _ = build.evaluation_data(config)
    faults = Faults(fabric, max_unreadable=config.data.max_unreadable)
    loading = {"batch_size": config.evaluate.batch_size, "workers": config.data.workers}

    def features_of(images, rows):
        numbered = _Numbered(images, rows)
        features, places = extract_features(backbone, numbered, fabric=fabric, faults=faults, **loading)
        readable = rows[places.cpu()]
        return Subset(images, readable), images.labels[readable], functional.normalize(features, dim=1).cpu()

    with build.threads(config.trainer):
        tests, test_labels, test_features = features_of(test, _test_rows(test.labels))
        gallery, gallery_labels, gallery_features = features_of(train, _some(train.labels, GALLERY))
    return Look(
        step=state["step"],
        classes=test.classes,
        tests=tests,
        gallery=gallery,
        test_labels=test_labels,
        gallery_labels=gallery_labels,
        test_features=test_features,
        gallery_features=gallery_features,
        total_tests=len(test),
        total_gallery=len(train),
        unreadable=faults.unreadable,
    )


class _Numbered(Dataset):
    """Some of the images, each with its place among them: of those that can be read it is known which they are."""

    def __init__(self, images, rows):
        self.images, self.rows = images, rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        image, _ = self.images[int(self.rows[index])]
        return image, index


def nearest(seen):
    """The `Neighbours` that a `Look` has of the first test image of each class, of some where there are many."""
    present = seen.test_labels.unique()
    chosen = present[_spread(len(present), QUERIES)]
    queries = torch.stack([(seen.test_labels == label).nonzero()[0, 0] for label in chosen])
    similarities = seen.test_features[queries] @ seen.gallery_features.T
    best = similarities.topk(min(NEIGHBOURS, len(seen.gallery)), dim=1)
    return Neighbours(queries, best.indices, best.values)


def picture(subset, place):
    """The image as it lies in the data set, a PIL image in RGB, and its label."""
    images = subset.dataset
    row = int(subset.indices[place])
    image, _ = images.source[int(images.rows[row])]
    return image.convert("RGB"), int(images.labels[row])


def _some(labels, limit):
    return balanced_rows(labels, min(limit, len(labels)))


def _test_rows(labels):
    """Rows of test images: of all classes in equal parts, or of some where there are many."""
    present = labels.unique()
    if len(present) > CLASSES:
        of_chosen = torch.isin(labels, present[_spread(len(present), CLASSES)]).nonzero()[:, 0]
        return of_chosen[_some(labels[of_chosen], TESTS)]
    return _some(labels, TESTS)


def _spread(total, count):
    """`count` places in 0 .. total - 1 with equal distances; all of them where there are fewer."""
    return torch.linspace(0, total - 1, min(count, total), dtype=torch.float64).round().long()
