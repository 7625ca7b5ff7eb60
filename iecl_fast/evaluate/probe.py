"""Linear classifiers that learn by SGD from frozen features: the protocols of both papers (`LINEAR_PROTOCOLS`)."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from iecl_fast.data import Readable
from iecl_fast.engine.faults import Faults
from iecl_fast.evaluate.features import extract_features, frozen
from iecl_fast.evaluate.sgd import FeatureBatches, ViewBatches, train_by_sgd


class Probe(nn.Module):
    """A frozen backbone and a linear classifier on what it gives: (N, 3, H, W) -> (N, num_classes).

    Args:
        backbone: (N, 3, H, W) -> (N, C); for feature maps with ``feature_map``: (N, 3, H, W) -> (N, C, h, w).
        kind: "pooled" or "map".
        num_classes: number of classes.
        sample: one image (1, 3, H, W), of which the features are counted.
    """

    def __init__(self, backbone, kind, num_classes, sample):
        super().__init__()
        self.backbone = backbone
        self.kind = kind
        self.classifier = zero_classifier(self.features(sample).shape[1], num_classes, sample.device)

    def features(self, images):
        """Float32 (N, numbers of an image), without gradient."""
        with frozen(self.backbone):
            features = self.backbone.feature_map(images) if self.kind == "map" else self.backbone(images)
        return features.flatten(1).float()

    def forward(self, images):
        return self.classifier(self.features(images))


def zero_classifier(num_features, num_classes, device, dtype=torch.float32):
    """A linear layer that starts from zero: what it learns owes nothing to chance."""
    classifier = nn.Linear(num_features, num_classes, device=device, dtype=dtype)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    return classifier


def probe_of_views(backbone, views, test, *, num_classes, protocol, fabric, batch_size, workers=0, faults=None):
    """Scores of a classifier that learns from views whose features are computed in each epoch anew.

    Nothing is kept of the features: as maps, 512 x 7 x 7 numbers for each image, they would fill 128 GB for ImageNet.

    Args:
        backbone: module on the device of `fabric`, as `Probe` takes it.
        views: `iecl_fast.data.ViewsDataset` of labelled training images, one view each.
        test: items (image (3, H, W), label, ...).
        num_classes: number of classes.
        protocol: `LinearProtocol`.
        fabric: `lightning_fabric.Fabric`.
        batch_size: test images of one forward pass.
        workers: processes that load images.
        faults: `Faults`, which counts and limits the unreadable images; None allows none.

    Returns:
        scores (m, num_classes) of the test images, their labels (m,) int64.
    """
    faults = Faults(fabric) if faults is None else faults
    sample = Readable(test, faults.max_unreadable)[0][0]
    probe = Probe(backbone, protocol.features, num_classes, sample[None].to(fabric.device))

    def loss_of(images, labels):
        return cross_entropy(probe(images), labels)

    def backward(loss):
        loss.backward()
        for parameter in probe.classifier.parameters():
            parameter.grad = fabric.all_reduce(parameter.grad, reduce_op="mean")

    batches = ViewBatches(views, batch_size=protocol.batch_size, fabric=fabric, workers=workers, faults=faults)
    _learn(probe.classifier, loss_of, backward, batches, protocol)
    return extract_features(probe, test, fabric=fabric, batch_size=batch_size, workers=workers, faults=faults)


def probe_of_features(train_features, train_labels, test_features, *, num_classes, protocol):
    """Scores of a classifier that learns from features computed once.

    Args:
        train_features, test_features: (n, C), (m, C) float32.
        train_labels: (n,) int64, 0 .. num_classes - 1.
        num_classes: number of classes.
        protocol: `LinearProtocol`.

    Returns:
        scores (m, num_classes).
    """
    classifier = zero_classifier(train_features.shape[1], num_classes, train_features.device)
    batches = FeatureBatches(train_features, train_labels, batch_size=protocol.batch_size)

    def loss_of(rows, labels):
        return cross_entropy(classifier(rows), labels)

    _learn(classifier, loss_of, torch.Tensor.backward, batches, protocol)
    with torch.no_grad():
        return classifier(test_features)


def _learn(classifier, loss_of, backward, batches, protocol):
    optimizer = torch.optim.SGD(
        classifier.parameters(), lr=protocol.lr, momentum=protocol.momentum, weight_decay=protocol.weight_decay
    )
    train_by_sgd(
        optimizer,
        loss_of,
        backward,
        batches,
        epochs=protocol.epochs,
        schedule=protocol.schedule,
        key="evaluate.linear_lr",
    )
