"""Linear probe of what a backbone pools in the end, trained by SGD: the Ring paper's protocol (Wu et al., 2021)."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from iecl_fast.data import Readable
from iecl_fast.engine.batches import EpochBatches
from iecl_fast.engine.faults import Faults
from iecl_fast.evaluate.accuracy import top_k_accuracies
from iecl_fast.evaluate.features import extract_features, frozen, read_batches

MOMENTUM = 0.9
DROPS = (0.6, 0.8)  # parts of the training after which the rate falls to a tenth


class Probe(nn.Module):
    """A frozen backbone and a linear classifier on its feature map: (N, 3, H, W) -> (N, num_classes)."""

    def __init__(self, backbone, num_classes, sample):
        super().__init__()
        self.backbone = backbone
        with frozen(backbone):
            size = self.features(sample).shape[1]
        self.classifier = nn.Linear(size, num_classes, device=sample.device)
        # From zero: the problem is convex, and the accuracy owes nothing to chance.
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def features(self, images):
        return self.backbone.feature_map(images).flatten(1).float()

    def forward(self, images):
        return self.classifier(self.features(images))


def feature_map_accuracy(backbone, views, test, *, num_classes, epochs, lr, batch_size, fabric, workers=0, faults=None):
    """Train a linear classifier on the feature maps of cropped and mirrored images, and apply it to the test images.

    Nothing is kept of the features, whose 512 x 7 x 7 numbers for each image would fill 128 GB for ImageNet; so the
    backbone runs over all images in each epoch. Rate and momentum are constant but for two falls to a tenth.

    Args:
        backbone: module with ``feature_map``: (N, 3, H, W) -> (N, C, h, w), on the device of `fabric`.
        views: `iecl_fast.data.ViewsDataset` of labelled training images, one view each.
        test: items (image (3, H, W), label, ...).
        num_classes: number of classes.
        epochs: passes over the training images, at least 1.
        lr: learning rate > 0.
        batch_size: images of a step, all ranks together.
        fabric: `lightning_fabric.Fabric`.
        workers: processes that load images.
        faults: `Faults`, which counts and limits the unreadable images; None allows none.

    Returns:
        dict: "linear_top1", "linear_top5", and the "linear_features", "linear_epochs" and "linear_lr" that were used.
    """
    faults = Faults(fabric) if faults is None else faults
    sample = Readable(test, faults.max_unreadable)[0][0][None].to(fabric.device)
    probe = Probe(backbone, num_classes, sample)
    optimizer = torch.optim.SGD(probe.classifier.parameters(), lr=lr, momentum=MOMENTUM)
    milestones = [max(1, round(drop * epochs)) for drop in DROPS]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
    ranks = {"rank": fabric.global_rank, "world_size": fabric.world_size}
    shared = max(1, batch_size // fabric.world_size) * fabric.world_size  # equal parts, whose mean is the batch's
    for epoch in range(epochs):
        views.set_epoch(epoch)
        batches = EpochBatches(len(views), shared, seed=views.seed, epoch=epoch, **ranks)
        items = Readable(views, faults.max_unreadable)
        loader = DataLoader(items, batch_sampler=batches, num_workers=workers, generator=torch.Generator())
        for (images,), labels, _, texts in read_batches(loader):
            faults.note(texts)
            with frozen(backbone):
                features = probe.features(images.to(fabric.device))
            optimizer.zero_grad()
            cross_entropy(probe.classifier(features), labels.to(fabric.device)).backward()
            for parameter in probe.classifier.parameters():
                parameter.grad = fabric.all_reduce(parameter.grad, reduce_op="mean")
            optimizer.step()
        schedule.step()
        faults.agree()
    loading = {"fabric": fabric, "batch_size": batch_size, "workers": workers, "faults": faults}
    scores, labels = extract_features(probe, test, **loading)
    used = {"linear_features": "map", "linear_epochs": epochs, "linear_lr": lr}
    return top_k_accuracies(scores, labels, "linear") | used
