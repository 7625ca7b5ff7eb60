"""The parts of a run, made from its configuration. What a part refuses is a UsageError that names its group."""

from contextlib import contextmanager

import torch

from iecl_fast.data import ViewsDataset, build_dataset, dataset_info, evaluation_transform, training_transform
from iecl_fast.engine.errors import UsageError
from iecl_fast.ring import RingSchedule, ring_ranks
from iecl_fast.ssl import METHODS, build_backbone, build_method


@contextmanager
def _of_group(name):
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(f"{name}: {error}") from None


def accelerator(trainer):
    """The accelerator's name for Fabric."""
    if trainer.accelerator != "auto":
        return trainer.accelerator
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def threads(trainer):
    """Context with the configuration's number of CPU threads, if it has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(trainer.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def training_views(config):
    """The training images in random views: items (list of views, label, index)."""
    with _of_group("data"):
        images = build_dataset(config.data.name, split="pretrain", limit=config.data.limit, **_location(config.data))
    transform = training_transform(**config.views)
    return ViewsDataset(images, transform, num_views=METHODS[config.method["name"]].num_views, seed=config.seed)


def evaluation_data(config):
    """The labelled images, without random changes: the training part, the test part, the number of classes."""
    data, views = config.data, config.views
    with _of_group("data"):
        info = dataset_info(data.name, root=data.root)
        transform = evaluation_transform(
            image_size=views["image_size"], mean=views["mean"], std=views["std"], crop_ratio=info.crop_ratio
        )
        train = build_dataset(data.name, split="train", limit=data.limit, transform=transform, **_location(data))
        test = build_dataset(data.name, split="test", transform=transform, **_location(data))
    return train, test, info.num_classes


def _location(data):
    return {"root": data.root, "download": data.download}


def method(config, *, total_steps, batch_size):
    """The method with its encoder, newly initialised from torch's random state.

    Args:
        config: `Config`.
        total_steps: optimiser steps of the whole run, over which Ring's annealing is spread.
        batch_size: images of one forward pass on one device, all of which are this many.
    """
    options = dict(config.method)
    with _of_group("ring"):
        # SimCLR's negatives are the other images of the batch, in both views.
        num_keys = options.get("num_keys", 2 * batch_size - 2)
        ring = None if config.ring is None else _ring_schedule(config.ring, num_keys, total_steps)
    with _of_group("encoder"):
        backbone = build_backbone(config.encoder.name, config.encoder.stem, config.encoder.width)
    with _of_group("saib"):
        saib = None if config.saib is None else _saib(config.saib, config.views["image_size"], batch_size)
    with _of_group("method"):
        return build_method(options.pop("name"), backbone, ring=ring, saib=saib, **options)


def _saib(saib, image_size, batch_size):
    from iecl_fast.saib import SAIB

    return SAIB(
        channels=saib.channels,
        batch_size=batch_size if saib.channels == "batch" else None,
        patch_size=saib.patch_size_for(image_size),
        image_size=image_size,
        activation=saib.activation,
        expansion=saib.expansion,
        cascade=saib.cascade,
        positional=saib.positional,
    )


def _ring_schedule(ring, num_keys, total_steps):
    """The schedule, if it keeps a key even where the ring is narrowest: a run must not find that out at its end."""
    schedule = RingSchedule(lower=ring.lower, upper=ring.upper, steps=max(1, round(ring.anneal * total_steps)))
    ring_ranks(max(schedule.start, schedule.end), schedule.upper, num_keys)
    return schedule


def optimizer(options, method):
    """The optimiser over the method's trained parameters.

    Args:
        options: `OptimizerConfig`.
        method: module; parameters without gradient, as a momentum encoder's, are left out. Its ``parameter_groups``,
            if it has that, may give some of them a weight decay of their own.
    """
    if hasattr(method, "parameter_groups"):
        parameters = method.parameter_groups(options.weight_decay)
    else:
        parameters = [parameter for parameter in method.parameters() if parameter.requires_grad]
    if options.name == "adamw":
        return torch.optim.AdamW(parameters, lr=options.lr, weight_decay=options.weight_decay)
    return torch.optim.SGD(parameters, lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay)
