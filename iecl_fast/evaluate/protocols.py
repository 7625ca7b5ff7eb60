"""The ways to measure a frozen encoder, and one call for several of them on features computed once."""

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from iecl_fast.evaluate.accuracy import top_k_accuracies
from iecl_fast.evaluate.features import extract_features, unchanged
from iecl_fast.evaluate.knn import knn_scores
from iecl_fast.evaluate.linear import linear_scores
from iecl_fast.evaluate.probe import probe_of_features, probe_of_views

PROTOCOLS = ("knn", "linear")


@dataclass(frozen=True)
class Measurement:
    """What a protocol makes of the test images.

    Attributes:
        protocol: its name, before each of the values.
        scores: (m, classes) float.
        labels: (m,) int64.
        settings: the values that were used, by their names.
    """

    protocol: str
    scores: Tensor
    labels: Tensor
    settings: dict

    def values(self):
        """Top-1 and top-5 accuracy, 0 .. 1, and the settings: plain values by their names."""
        accuracies = top_k_accuracies(self.scores, self.labels, self.protocol)
        return accuracies | {f"{self.protocol}_{name}": value for name, value in self.settings.items()}


def measure(*data, **options):
    """Accuracies of a frozen backbone: the values of all that `judge`, which takes the same arguments, gives."""
    return {name: value for measurement in judge(*data, **options) for name, value in measurement.values().items()}


def judge(backbone, train, test, num_classes, protocols, *, options, fabric, workers=0, probe_views=None, faults=None):
    """What a frozen backbone's features say about the test images.

    Args:
        backbone: module, (N, 3, H, W) -> (N, C).
        train, test: data sets of (image, label, ...): the features that are learned from, and those that are judged.
        num_classes: number of classes.
        protocols: names from `PROTOCOLS`.
        options: `EvaluateConfig`.
        fabric: `lightning_fabric.Fabric`.
        workers: processes that load images.
        probe_views: `ViewsDataset` of the training images, if the linear classifier is to learn from these; else it
            learns from features computed once.
        faults: `Faults`, which counts and limits the unreadable images, which are left out; None allows none.

    Returns:
        list of `Measurement`, one for each protocol.

    Raises:
        RunError: the backbone did not stay as it was; more images cannot be read than allowed; a training diverged.
    """
    loading = {"fabric": fabric, "batch_size": options.batch_size, "workers": workers, "faults": faults}
    by_views = "linear" in protocols and probe_views is not None
    by_features = [_BY_FEATURES[name] for name in protocols if not (name == "linear" and by_views)]
    measurements = []
    with unchanged(backbone):
        if by_views:
            protocol = options.linear_protocol()
            classes = {"num_classes": num_classes, "protocol": protocol}
            scores, labels = probe_of_views(backbone, probe_views, test, **classes, **loading)
            measurements.append(Measurement("linear", scores, labels, _linear_settings(options)))
        if by_features:
            known = extract_features(backbone, train, **loading)
            asked, labels = extract_features(backbone, test, **loading)
            measurements += [classify(*known, asked, labels, num_classes, options) for classify in by_features]
    return measurements


def _knn(train_features, train_labels, test_features, test_labels, num_classes, options):
    settings = {"k": min(options.knn_k, len(train_features)), "temperature": options.knn_temperature}
    scores = knn_scores(train_features, train_labels, test_features, num_classes=num_classes, **settings)
    return Measurement("knn", scores, test_labels, settings)


def _linear(train_features, train_labels, test_features, test_labels, num_classes, options):
    data = (train_features, train_labels, test_features)
    protocol = options.linear_protocol()
    if protocol is None:
        fit = {"l2": options.linear_l2, "iterations": options.linear_iterations}
        scores = linear_scores(*data, num_classes=num_classes, **fit)
    else:
        scores = probe_of_features(*data, num_classes=num_classes, protocol=protocol)
    return Measurement("linear", scores, test_labels, _linear_settings(options))


_BY_FEATURES = {"knn": _knn, "linear": _linear}


def _linear_settings(options):
    protocol = options.linear_protocol()
    if protocol is None:
        own = {"l2": options.linear_l2, "iterations": options.linear_iterations}
    else:
        own = dataclasses.asdict(protocol)
    return {"protocol": options.linear} | own
