"""Train a detector or a segmenter on annotated images, and let it predict."""

import math

import torch
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from iecl_fast.engine.batches import EpochBatches
from iecl_fast.engine.errors import RunError, UsageError
from iecl_fast.engine.schedule import learning_rate
from iecl_fast.evaluate.dense.datasets import as_lists
from iecl_fast.evaluate.dense.voc import UNLABELLED
from iecl_fast.evaluate.features import frozen, read_batches


def detection_losses(detector, images, targets):
    """The dict of losses of a batch: lists of images and targets, on the detector's device."""
    return detector(images, targets)


def segmentation_losses(segmenter, images, masks):
    """The mean cross entropy of the pixels that have a class: images (N, 3, H, W), masks (N, H, W)."""
    scores = segmenter(images)["out"]
    # A batch without any such pixel has a loss of 0 and not of 0 / 0.
    pixels = (masks != UNLABELLED).sum().clamp_min(1)
    total = cross_entropy(scores.float(), masks, ignore_index=UNLABELLED, reduction="sum")
    return {"cross_entropy": total / pixels}


class Training:
    """The training of a network around a backbone.

    Args:
        fabric: `lightning_fabric.Fabric` of one device.
        network: module; the optimiser takes what of it has a gradient.
        losses: function (network, images, targets) -> dict of named losses.
        images: data set with ``set_epoch``, whose items `collate` makes a batch of (images, targets).
        collate: function; None is torch's own.
        settings: `DenseSettings`.
        stillness: `Stillness` of the backbone.

    Attributes:
        steps_per_epoch, total_steps: ints.

    Raises:
        UsageError: fewer than two images.
    """

    def __init__(self, fabric, network, losses, images, *, collate, settings, stillness):
        if len(images) < 2:
            raise UsageError(f"train: there are {len(images)} images with something to learn, at least 2 are needed")
        self.fabric, self.losses, self.images, self.collate = fabric, losses, images, collate
        self.settings, self.stillness = settings, stillness
        network.to(fabric.device)
        optimizer = torch.optim.SGD(
            _parameter_groups(network, settings.weight_decay), lr=settings.lr, momentum=settings.momentum
        )
        # Not wrapped by Fabric, whose wrapper would round the boxes' coordinates to 16 bits under mixed precision.
        self.network, self.optimizer = network, fabric.setup_optimizers(optimizer)
        self.steps_per_epoch = len(self._batches(0))
        self.total_steps = self.steps_per_epoch * settings.epochs
        self.step = 0

    def run(self, log):
        """Take all steps, and see that what was to stay has stayed.

        Args:
            log: `RunLog`.

        Raises:
            RunError: a loss or a weight is no number any more, with the step; an image cannot be read; the frozen part
                has changed.
        """
        for epoch in range(self.settings.epochs):
            self.network.train()
            self.stillness.hold()
            self.images.set_epoch(epoch)
            for images, targets in self._loader(epoch):
                rate = self._learning_rate()
                values = self._optimize(to_device(images, self.fabric), to_device(targets, self.fabric), rate)
                self.step += 1
                if self.step % self.settings.log_steps == 0 or self.step in (1, self.total_steps):
                    log.write(self.step, epoch + 1, rate, values)
                log.advance()
        self.stillness.check()
        if not all(parameter.isfinite().all() for parameter in self.network.parameters()):
            raise self._diverged("a weight is no finite number after step", self.step)

    def _diverged(self, what, step, parts=""):
        words = f"{what} {step} of {self.total_steps}{parts}: the training has diverged"
        return RunError(f"{words}; try an lr below {self.settings.lr}")

    def _optimize(self, images, targets, rate):
        """One step. Returns the losses as floats, their sum first."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.fabric.autocast():
            losses = self.losses(self.network, images, targets)
        total = sum(losses.values())
        values = {"loss": total.item()} | {name: loss.item() for name, loss in losses.items() if len(losses) > 1}
        if not math.isfinite(values["loss"]):
            parts = ", ".join(f"{name} {value}" for name, value in values.items())
            raise self._diverged("the loss is no number at step", self.step + 1, f" ({parts})")
        self.fabric.backward(total)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return values

    def _learning_rate(self):
        return learning_rate(
            self.step,
            peak=self.settings.lr,
            schedule=self.settings.rate_schedule(),
            steps_per_epoch=self.steps_per_epoch,
            total_steps=self.total_steps,
        )

    def _batches(self, epoch):
        return EpochBatches(len(self.images), self.settings.batch_size, seed=self.settings.seed, epoch=epoch)

    def _loader(self, epoch):
        loader = DataLoader(
            self.images,
            batch_sampler=self._batches(epoch),
            num_workers=self.settings.workers,
            collate_fn=self.collate,
            generator=torch.Generator(),
        )
        return read_batches(loader)


def measure_detector(detector, images, metric, *, fabric, batch_size, workers=0):
    """Let a detector predict all images and give metric's values.

    Args:
        detector: torchvision's, on the device of `fabric`.
        images: `DetectionImages` that are not for training.
        metric: `DetectionMetric`.
        fabric: `lightning_fabric.Fabric`.
        batch_size: images of one forward pass.
        workers: processes that load images.
    """
    loader = DataLoader(images, batch_size=batch_size, num_workers=workers, collate_fn=as_lists)
    with frozen(detector), fabric.autocast():
        for batch, targets in read_batches(loader):
            metric.update(detector(to_device(batch, fabric)), targets)
    return metric.compute()


def measure_segmenter(segmenter, images, metric, *, fabric, workers=0):
    """Let a segmenter predict all images, each in its own size, and give metric's values; see `measure_detector`."""
    loader = DataLoader(images, batch_size=1, num_workers=workers)
    with frozen(segmenter), fabric.autocast():
        for batch, masks in read_batches(loader):
            metric.update(segmenter(batch.to(fabric.device))["out"], masks.to(fabric.device))
    return metric.compute()


def _parameter_groups(network, weight_decay):
    """The parameters that have a gradient. Those of batch norm do not decay, as in Detectron2."""
    norms = (module for module in network.modules() if isinstance(module, _BatchNorm))
    of_norm = {id(parameter) for norm in norms for parameter in norm.parameters()}
    moving = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in moving if id(parameter) not in of_norm], "weight_decay": weight_decay},
        {"params": [parameter for parameter in moving if id(parameter) in of_norm], "weight_decay": 0.0},
    ]


def to_device(value, fabric):
    """A tensor, or tensors in lists and dicts, on the device of `fabric`."""
    if isinstance(value, torch.Tensor):
        return value.to(fabric.device, non_blocking=True)
    if isinstance(value, dict):
        return {name: to_device(item, fabric) for name, item in value.items()}
    return [to_device(item, fabric) for item in value]
