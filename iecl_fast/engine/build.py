"""The parts of a run, made from its configuration. What a part refuses is a UsageError that names its group."""

from contextlib import contextmanager

import torch

from iecl_fast.data import (
    ViewsDataset,
    balanced_rows,
    build_dataset,
    dataset_info,
    evaluation_transform,
    pixel_transform,
    training_transform,
)
from iecl_fast.engine.errors import UsageError
from iecl_fast.ring import AdaptiveRingSchedule, RingSchedule, ring_ranks
from iecl_fast.ssl import METHODS, accepts, build_backbone, build_lab_backbone, build_method
from iecl_fast.ssl.batch_norm import sync_batch_norm


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
    data = config.data
    with _of_group("data"):
        test = build_dataset(data.name, split="test", transform=_plain_view(config), **_location(data))
    train = _labelled_images(config, _plain_view(config))
    return train, test, len(train.classes)


def labelled_views(config):
    """The labelled training images, cropped and mirrored: items ([view], label, index)."""
    kept = {name: config.views[name] for name in ("image_size", "mean", "std", "crop_scale", "rotate", "flip")}
    transform = training_transform(**kept, jitter_probability=0.0, gray=0.0, blur=0.0)
    return ViewsDataset(_labelled_images(config), transform, num_views=1, seed=config.seed)


def probe_views(config):
    """What the linear probe computes features of in each epoch anew; None where they are computed once.

    Feature maps are too large to be kept, so without crops they come from the images as they are.
    """
    protocol = config.evaluate.linear_protocol()
    if protocol is not None and protocol.crops:
        return labelled_views(config)
    if protocol is not None and protocol.features == "map":
        return ViewsDataset(_labelled_images(config), _plain_view(config), num_views=1, seed=config.seed)
    return None


def training_pixels(config):
    """The training images as evaluation sees them, but not standardised: items (uint8 (3, H, W), label)."""
    data = config.data
    with _of_group("data"):
        crop_ratio = dataset_info(data.name, root=data.root).crop_ratio
        transform = pixel_transform(image_size=config.views["image_size"], crop_ratio=crop_ratio)
        return build_dataset(data.name, split="train", limit=data.limit, transform=transform, **_location(data))


def _labelled_images(config, transform=None):
    """The training images whose labels are used."""
    data, fraction = config.data, config.evaluate.labels
    with _of_group("data"):
        images = build_dataset(data.name, split="train", limit=data.limit, transform=transform, **_location(data))
    if fraction == 1:
        return images
    chosen = max(len(images.labels.unique()), round(fraction * len(images)))
    return images.subset(balanced_rows(images.labels, chosen, seed=config.seed))


def _plain_view(config):
    """The view without chance."""
    views = config.views
    with _of_group("data"):
        crop_ratio = dataset_info(config.data.name, root=config.data.root).crop_ratio
    return evaluation_transform(
        image_size=views["image_size"], mean=views["mean"], std=views["std"], crop_ratio=crop_ratio
    )


def _location(data):
    return {"root": data.root, "download": data.download}


def method(config, *, total_steps, batch_size, num_images, world_size=1):
    """The method with its encoder, newly initialised from torch's random state.

    Args:
        config: `Config`.
        total_steps: optimiser steps of the whole run, over which Ring's annealing is spread.
        batch_size: images of one forward pass on one device, all of which are this many.
        num_images: training images; methods with a memory bank keep an entry for each.
        world_size: devices that train together.
    """
    options = dict(config.method)
    name = options.pop("name")
    # What is counted in epochs becomes steps here, once: an epoch's optimiser steps depend on accumulation, and not on
    # the number of devices.
    steps_per_epoch = max(1, total_steps // config.trainer.epochs)
    known = {"num_images": num_images, "steps_per_epoch": steps_per_epoch}
    options |= {key: value for key, value in known.items() if accepts(name, key)}
    ring = None
    if config.ring is not None:
        with _of_group("ring"):
            candidates = ring_candidates(config, num_images, batch_size * world_size)
            ring = _ring_schedule(config.ring, candidates, total_steps, steps_per_epoch)
    with _of_group("encoder"):
        encoder = (config.encoder.name, config.encoder.stem, config.encoder.width)
        if name == "cmc":  # looks at colours, so it has to undo the views' standardisation
            backbone = build_lab_backbone(*encoder, mean=config.views["mean"], std=config.views["std"])
        else:
            backbone = build_backbone(*encoder)
    with _of_group("saib"):
        saib = None if config.saib is None else _saib(config.saib, config.views["image_size"], batch_size)
    with _of_group("method"):
        built = build_method(name, backbone, ring=ring, saib=saib, **options)
    if config.trainer.sync_batch_norm and world_size > 1:
        sync_batch_norm(built)
    return built


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


def ring_candidates(config, num_images, batch_size):
    """How many keys a ring is taken from: the queue's; of a memory bank all but the query's own entry; for SimCLR the
    other images of all devices' batch, in both views."""
    if accepts(config.method["name"], "num_images"):
        return num_images - 1
    return config.method.get("num_keys", 2 * batch_size - 2)


def _ring_schedule(ring, num_candidates, total_steps, steps_per_epoch):
    """The schedule, if it keeps a key even where the ring is narrowest: a run must not find that out at its end."""
    steps = ring.anneal * total_steps if ring.anneal_epochs is None else ring.anneal_epochs * steps_per_epoch
    path = {"lower": ring.lower, "upper": ring.upper, "steps": max(1, round(steps))}
    schedule = RingSchedule(**path)
    ring_ranks(max(schedule.start, schedule.end), schedule.upper, num_candidates)
    if ring.shape == "adaptive":
        return AdaptiveRingSchedule(**path)
    return RingSchedule(**path, shape=ring.shape, stages=ring.stages)


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
