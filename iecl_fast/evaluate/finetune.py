"""Fine-tuning: the whole network learns from labelled images, from the pretrained weights on."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.faults import Faults
from iecl_fast.evaluate.features import extract_features
from iecl_fast.evaluate.probe import zero_classifier
from iecl_fast.evaluate.sgd import ViewBatches, train_by_sgd


def finetune(backbone, views, test, *, num_classes, options, fabric, workers=0, faults=None):
    """Train backbone and a new linear classifier by SGD, each with its own rate, and judge the test images.

    The classifier starts from zero and batch norm learns on. Reported is the last epoch, whatever the test images say
    of those before.

    Args:
        backbone: module, (N, 3, H, W) -> (N, C), on the device of `fabric`. It is trained in place.
        views: `iecl_fast.data.ViewsDataset` of labelled training images, one view each.
        test: items (image (3, H, W), label, ...).
        num_classes: number of classes.
        options: `EvaluateConfig`.
        fabric: `lightning_fabric.Fabric` of one device.
        workers: processes that load images.
        faults: `Faults`, which counts and limits the unreadable images; None allows none.

    Returns:
        scores (m, num_classes) of the test images, their labels (m,) int64.

    Raises:
        UsageError: less than two training images, with which batch norm cannot learn.
        RunError: the loss is no number any more, more images cannot be read than allowed.
    """
    faults = Faults(fabric) if faults is None else faults
    if len(views) < 2:
        raise UsageError(f"data: fine-tuning needs at least 2 labelled training images, there is {len(views)}")
    classifier = zero_classifier(backbone.feature_dim, num_classes, fabric.device)
    model = nn.Sequential(backbone, classifier)
    groups = [
        {"params": backbone.parameters(), "lr": options.finetune_lr},
        {"params": classifier.parameters(), "lr": options.finetune_head_lr},
    ]
    optimizer = torch.optim.SGD(groups, momentum=options.finetune_momentum, weight_decay=options.finetune_weight_decay)
    wrapped, optimizer = fabric.setup(model.train(), optimizer)  # the same modules, with precision around them
    train_by_sgd(
        optimizer,
        lambda images, labels: cross_entropy(wrapped(images), labels),
        fabric.backward,
        ViewBatches(views, batch_size=options.finetune_batch_size, fabric=fabric, workers=workers, faults=faults),
        epochs=options.finetune_epochs,
        schedule=options.finetune_schedule,
        key="evaluate.finetune_lr or evaluate.finetune_head_lr",
    )
    loading = {"fabric": fabric, "batch_size": options.batch_size, "workers": workers, "faults": faults}
    return extract_features(model, test, **loading)
