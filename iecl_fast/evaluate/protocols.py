"""The ways to measure an encoder, and one call for several of them on features computed once."""

from iecl_fast.evaluate.feature_map import feature_map_accuracy
from iecl_fast.evaluate.features import extract_features
from iecl_fast.evaluate.knn import knn_accuracy
from iecl_fast.evaluate.linear import linear_accuracy

PROTOCOLS = ("knn", "linear")


def measure(
    backbone, train, test, num_classes, protocols, *, options, fabric, workers=0, probe_views=None, faults=None
):
    """Accuracies of a frozen backbone.

    Args:
        backbone: module, (N, 3, H, W) -> (N, C).
        train, test: data sets of (image, label, ...): the features that are learned from, and those that are judged.
        num_classes: number of classes.
        protocols: names from `PROTOCOLS`.
        options: `EvaluateConfig`.
        fabric: `lightning_fabric.Fabric`.
        workers: processes that load images.
        probe_views: `ViewsDataset` of the training images, on which the linear probe learns from feature maps; None
            for a probe of the pooled features.
        faults: `Faults`, which counts and limits the unreadable images, which are left out; None allows none.

    Returns:
        dict: for each protocol its top-1 and top-5 accuracy, 0 .. 1, and the settings that were used.
    """
    loading = {"fabric": fabric, "batch_size": options.batch_size, "workers": workers, "faults": faults}
    result = {}
    if "linear" in protocols and probe_views is not None:
        epochs, lr = options.linear_epochs, options.linear_lr
        result |= feature_map_accuracy(
            backbone, probe_views, test, num_classes=num_classes, epochs=epochs, lr=lr, **loading
        )
        protocols = [name for name in protocols if name != "linear"]
    if not protocols:
        return result
    features = (*extract_features(backbone, train, **loading), *extract_features(backbone, test, **loading))
    if "knn" in protocols:
        k, temperature = options.knn_k, options.knn_temperature
        result |= knn_accuracy(*features, num_classes=num_classes, k=k, temperature=temperature)
    if "linear" in protocols:
        l2, iterations = options.linear_l2, options.linear_iterations
        result |= linear_accuracy(*features, num_classes=num_classes, l2=l2, iterations=iterations)
    return result
