"""Measure the encoder of a checkpoint, on the data it was trained on or on other."""

import dataclasses
from dataclasses import dataclass

from lightning_fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from iecl_fast.data import Readable, channel_statistics
from iecl_fast.engine import build
from iecl_fast.engine.config import merge, resolve
from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.faults import Faults, lost_workers
from iecl_fast.engine.settings import LinearProtocol
from iecl_fast.evaluate.accuracy import class_accuracies, confusion_matrix
from iecl_fast.evaluate.features import read_batches
from iecl_fast.evaluate.finetune import finetune
from iecl_fast.evaluate.protocols import Measurement, judge
from iecl_fast.evaluate.restore import checkpoint_path, load_trained, restore_method


@dataclass(frozen=True)
class Evaluation:
    """What a protocol found on a data set.

    Attributes:
        data: name of the data set, or its folder.
        summary: checkpoint, data, accuracies and the settings that were used: plain values by their names.
        protocol: name of the protocol.
        classes: name of each class.
        confusion: (classes, classes) int64, images of each class (first axis) taken for which (second).
    """

    data: str
    summary: dict
    protocol: str
    classes: list[str]
    confusion: Tensor

    def result(self):
        """All of it as plain values; a class without test images has no accuracy, None."""
        by_class = dict(zip(self.classes, class_accuracies(self.confusion), strict=True))
        return self.summary | {
            f"{self.protocol}_class_mean": self.class_mean(),
            "classes": self.classes,
            f"{self.protocol}_class_top1": by_class,
            f"{self.protocol}_confusion": self.confusion.tolist(),
        }

    def class_mean(self):
        """Mean of the classes' accuracies, in which a rare class counts as much as a common one."""
        known = [accuracy for accuracy in class_accuracies(self.confusion) if accuracy is not None]
        return sum(known) / len(known)


def evaluate_checkpoint(protocol, checkpoint, *, data=(), overrides=None):
    """Accuracy of a checkpoint's encoder on each of some data sets.

    All data sets are looked for, and the training images of those that need mean and deviation are read, before the
    first is evaluated.

    Args:
        protocol: a name from `iecl_fast.evaluate.protocols.PROTOCOLS`, or "finetune".
        checkpoint: a checkpoint file, or a run folder.
        data: names of data sets or folders; none is the run's own.
        overrides: nested mapping over the run's configuration, for example another k.

    Returns:
        list of `Evaluation`, one for each data set.

    Raises:
        UsageError: no checkpoint, a damaged one, or data that is not there.
        RunError: more images cannot be read than allowed, a process that loads them has ended, a training diverged, a
            frozen encoder did not stay as it was.
    """
    path = checkpoint_path(checkpoint)
    state = load_trained(path)
    overrides = overrides or {}
    if data and "name" in (given := _group(overrides, "data")):
        raise UsageError(f"data.name={given['name']}: there is --data already, give one of them")
    layers = [{"data": {"name": name, "limit": None}} for name in data] or [{}]
    configs = [_configuration(state["config"], merge(layer, overrides)) for layer in layers]
    names = [config.data.name for config in configs]
    if len(set(names)) < len(names):
        raise UsageError(f"--data: each data set only once, got {', '.join(names)}")
    for config in configs:
        build.evaluation_data(config)
    with lost_workers():
        configs = [_standardised(state["config"], config, overrides) for config in configs]
        return [_evaluate(protocol, state, path, config) for config in configs]


def _configuration(saved, overrides):
    """The run's configuration with overrides over it.

    Other data come with their own views, of the size that the encoder knows. Another linear protocol comes with its own
    values; so it does for a run from before there were protocols.
    """
    evaluate = saved["evaluate"]
    before = evaluate.get("linear")
    if before is None or _group(overrides, "evaluate").get("linear", before) != before:
        dropped = [f"linear_{field.name}" for field in dataclasses.fields(LinearProtocol)]
        evaluate = {key: value for key, value in evaluate.items() if key not in dropped}
    config = resolve(merge(saved | {"evaluate": evaluate}, overrides))
    if config.data.name != saved["data"]["name"]:
        size = {"image_size": saved["views"]["image_size"]}
        config = resolve(merge(saved | {"evaluate": evaluate, "views": size}, overrides))
    # With the values of keys that came after it.
    original = resolve(saved | {"data": {"name": "digits"}, "evaluate": {}}).to_dict()
    for group in ("method", "ring", "saib", "encoder"):
        if config.to_dict()[group] != original[group]:
            raise UsageError(f"{group}: the checkpoint's encoder is as it is, {group} cannot be changed here")
    size, own = config.views["image_size"], saved["views"]["image_size"]
    if config.saib is not None and size != own:
        raise UsageError(f"views.image_size: {size} is not allowed, the checkpoint's SAIB was built for {own}")
    return config


def _standardised(saved, config, overrides):
    """The configuration with the mean and deviation of its data in its views."""
    if config.data.name == saved["data"]["name"]:
        return config
    if config.evaluate.statistics == "run":
        statistics = {name: saved["views"][name] for name in ("mean", "std")}
    else:
        pixels = Readable(build.training_pixels(config), config.data.max_unreadable)
        loader = DataLoader(pixels, batch_size=config.evaluate.batch_size, num_workers=config.data.workers)
        # What stands in for an unreadable image is counted once all the same.
        batches = ((images, [not text for text in texts]) for images, _, texts in read_batches(loader))
        mean, std = channel_statistics(images[readable] for images, readable in batches)
        statistics = {"mean": mean, "std": std}
    given = [name for name, value in _group(overrides, "views").items() if value is not None]
    found = {name: value for name, value in statistics.items() if name not in given}
    return dataclasses.replace(config, views=config.views | found)


def _group(overrides, name):
    """The overrides of a group; what is no group is refused where the configuration is resolved."""
    group = overrides.get(name)
    return group if isinstance(group, dict) else {}


def _evaluate(protocol, state, path, config):
    # Frozen features are computed in float32, as in the run.
    precision = config.trainer.precision if protocol == "finetune" else "32-true"
    fabric = Fabric(accelerator=build.accelerator(config.trainer), devices=1, precision=precision)
    backbone = restore_method(state, config, path).backbone.to(fabric.device)
    train, test, num_classes = build.evaluation_data(config)
    faults = Faults(fabric, max_unreadable=config.data.max_unreadable)
    options = {"options": config.evaluate, "fabric": fabric, "workers": config.data.workers, "faults": faults}
    with build.threads(config.trainer):
        if protocol == "finetune":
            views = build.labelled_views(config)
            scores, labels = finetune(backbone, views, test, num_classes=num_classes, **options)
            measurement = Measurement("finetune", scores, labels, _finetune_settings(config.evaluate))
        else:
            probe_views = build.probe_views(config)
            (measurement,) = judge(backbone, train, test, num_classes, (protocol,), **options, probe_views=probe_views)
    unread_tests = len(test) - len(measurement.labels)
    summary = {
        "checkpoint": str(path),
        "data": config.data.name,
        "step": state["step"],
        "labels": config.evaluate.labels,
        "train_images": len(train) - (len(faults.unreadable) - unread_tests),
        "test_images": len(measurement.labels),
        "mean": list(config.views["mean"]),
        "std": list(config.views["std"]),
        "unreadable_images": len(faults.unreadable),
        **measurement.values(),
    }
    confusion = confusion_matrix(measurement.scores, measurement.labels)
    return Evaluation(config.data.name, summary, protocol, list(train.classes), confusion)


def _finetune_settings(options):
    values = dataclasses.asdict(options)
    return {key.removeprefix("finetune_"): value for key, value in values.items() if key.startswith("finetune_")}
