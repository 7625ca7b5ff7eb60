"""SGD of the evaluation protocols: a linear classifier on frozen features, or a whole network."""

import math

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from iecl_fast.data import Readable
from iecl_fast.engine.batches import EpochBatches
from iecl_fast.engine.errors import RunError
from iecl_fast.engine.schedule import learning_rate
from iecl_fast.engine.settings import ScheduleConfig
from iecl_fast.evaluate.features import read_batches

DROPS = (0.6, 0.8)  # parts of the training after which the step schedule falls to a tenth


def train_by_sgd(optimizer, loss_of, backward, batches, *, epochs, schedule, key):
    """Take one step for each batch of each epoch.

    Args:
        optimizer: its groups' rates are their peaks.
        loss_of: called with what a batch holds, gives the scalar loss.
        backward: called with that loss, leaves the gradients that the step is to take.
        batches: `ViewBatches` or `FeatureBatches`.
        epochs: at least 1.
        schedule: "cosine", "step" or "constant"; see `learning_rate`.
        key: of the configuration, the rate that a diverged training is told to lower.

    Raises:
        RunError: the loss is no number any more.
    """
    milestones = tuple(max(1, round(drop * epochs)) for drop in DROPS)
    shape = ScheduleConfig(name=schedule, milestones=milestones)
    total = {"steps_per_epoch": len(batches), "total_steps": len(batches) * epochs}
    peaks = [group["lr"] for group in optimizer.param_groups]
    step = 0
    for epoch in tqdm(range(epochs), unit="epoch", leave=False, disable=None):  # only where somebody watches
        for batch in batches.of_epoch(epoch):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = learning_rate(step, peak=peak, schedule=shape, **total)
            optimizer.zero_grad()
            loss = loss_of(*batch)
            backward(loss)
            optimizer.step()
            step += 1
        if not math.isfinite(loss.item()):
            raise RunError(f"the loss is {loss.item()} in epoch {epoch + 1} of {epochs}: try a smaller {key}")


class ViewBatches:
    """Batches (images, labels) of labelled views, in each epoch in another order and with other draws.

    With several ranks each gets its part of every batch, and all parts are equally large.

    Args:
        views: `iecl_fast.data.ViewsDataset` of one view each.
        batch_size: images of a step, all ranks together.
        fabric: `lightning_fabric.Fabric`, to whose device the batches come.
        workers: processes that load images.
        faults: `Faults`, which counts and limits the unreadable images, in whose place others come.
    """

    def __init__(self, views, *, batch_size, fabric, workers, faults):
        self.views = views
        self.faults = faults
        self.batch_size = max(1, batch_size // fabric.world_size) * fabric.world_size
        self.fabric = fabric
        self.workers = workers

    def __len__(self):
        return len(self._order(epoch=0))

    def of_epoch(self, epoch):
        self.views.set_epoch(epoch)
        loader = DataLoader(
            Readable(self.views, self.faults.max_unreadable),
            batch_sampler=self._order(epoch),
            num_workers=self.workers,
            generator=torch.Generator(),  # its own, so that the global random state stays as it is
        )
        for (images,), labels, _, texts in read_batches(loader):
            self.faults.note(texts)
            yield images.to(self.fabric.device), labels.to(self.fabric.device)
        self.faults.agree()

    def _order(self, epoch):
        ranks = {"rank": self.fabric.global_rank, "world_size": self.fabric.world_size}
        return EpochBatches(len(self.views), self.batch_size, seed=self.views.seed, epoch=epoch, **ranks)


class FeatureBatches:
    """Batches (features, labels) of features that are there already, in each epoch in another order.

    The order is the same for every run: with several ranks all take the same steps, each the whole batch.

    Args:
        features: (N, C) float32.
        labels: (N,) int64.
        batch_size: rows of a step.
    """

    def __init__(self, features, labels, *, batch_size):
        self.features = features
        self.labels = labels
        self.batch_size = batch_size

    def __len__(self):
        return len(self._order(epoch=0))

    def of_epoch(self, epoch):
        for rows in self._order(epoch):
            yield self.features[rows], self.labels[rows]

    def _order(self, epoch):
        return EpochBatches(len(self.features), self.batch_size, seed=0, epoch=epoch)
