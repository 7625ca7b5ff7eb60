"""A run's steps, counted, and all that follows from its settings before it begins: what ``--dry-run`` prints."""

from dataclasses import dataclass

import torch
import yaml

from iecl_fast.engine import build
from iecl_fast.engine.batches import EpochBatches
from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.folder import find_folder
from iecl_fast.engine.processes import count_processes
from iecl_fast.engine.schedule import learning_rate
from iecl_fast.engine.traffic import bytes_received
from iecl_fast.ring import ring_ranks


@dataclass(frozen=True)
class Steps:
    """How a run is cut into steps. All counts are of all devices together: the steps do not depend on their number.

    Attributes:
        batch_size: images of one forward pass.
        images_per_pass: of it on one device.
        per_epoch, total: optimiser steps.
    """

    batch_size: int
    images_per_pass: int
    per_epoch: int
    total: int


def count_steps(config, num_images, world_size):
    """The `Steps` of a run.

    Raises:
        UsageError: too few images for the devices, for an optimiser step, or for SAIB's whole batches.
    """
    trainer, data = config.trainer, config.data.name
    if num_images < 2 * world_size:
        raise UsageError(f"data: there must be at least 2 images for each device, {data} has too few")
    batches = EpochBatches(num_images, trainer.batch_size, seed=config.seed, epoch=0, world_size=world_size)
    per_epoch = len(batches) // trainer.accumulate
    if per_epoch == 0:
        raise UsageError(
            f"trainer.accumulate={trainer.accumulate} is more than the batches of an epoch: "
            f"{num_images} images in batches of {trainer.batch_size}"
        )
    whole = config.saib is not None and config.saib.channels == "batch"
    if whole and batches.batch_size != trainer.batch_size:
        raise UsageError(
            f"trainer.batch_size: {trainer.batch_size} is not allowed with saib.channels=batch, which needs whole "
            f"batches: {data} has {num_images} images. Take fewer, or saib.channels=patch"
        )
    return Steps(batches.batch_size, batches.batch_size // world_size, per_epoch, per_epoch * trainer.epochs)


def effective_settings(config, resume=None):
    """What a run with this configuration would be, as nested plain values. Starts no process and writes nothing.

    Args:
        config, resume: as `iecl_fast.engine.pretrain.pretrain` takes them.

    Raises:
        UsageError: what a run would refuse, but for devices that are not here.
    """
    trainer = config.trainer
    folder = find_folder(config, resume)
    processes = count_processes(trainer)
    num_images = len(build.training_views(config))
    build.evaluation_data(config)
    steps = count_steps(config, num_images, processes.world_size)
    torch.manual_seed(config.seed)
    method = build.method(
        config,
        total_steps=steps.total,
        batch_size=steps.images_per_pass,
        num_images=num_images,
        world_size=processes.world_size,
    )
    rate = {"peak": config.optimizer.lr, "schedule": config.schedule}
    rate |= {"steps_per_epoch": steps.per_epoch, "total_steps": steps.total}
    traffic = bytes_received(config, method, images_per_pass=steps.images_per_pass, world_size=processes.world_size)
    return {
        "processes": {
            "world_size": processes.world_size,
            "nodes": processes.nodes,
            "devices_per_node": processes.devices,
            "started_by": "torchrun" if processes.torchrun or processes.nodes > 1 else "iecl-fast",
            "accelerator": build.accelerator(trainer),
            "precision": trainer.precision,
        },
        "batch": {
            "all_devices": steps.batch_size,
            "each_device": steps.images_per_pass,
            "accumulate": trainer.accumulate,
            "images_per_step": steps.batch_size * trainer.accumulate,
        },
        "steps": {
            "images": num_images,
            "left_out_each_epoch": num_images - steps.per_epoch * steps.batch_size * trainer.accumulate,
            "per_epoch": steps.per_epoch,
            "epochs": trainer.epochs,
            "total": steps.total,
        },
        "learning_rate": {
            "first": learning_rate(0, **rate),
            "peak": config.optimizer.lr,
            "last": learning_rate(steps.total - 1, **rate),
            "warmup_steps": round(config.schedule.warmup_epochs * steps.per_epoch),
        },
        "ring": _ring(method, build.ring_candidates(config, num_images, steps.batch_size)),
        "parameters": {
            "trained": sum(p.numel() for p in method.parameters() if p.requires_grad),
            "all": sum(p.numel() for p in method.parameters()),
            "buffers_mib": _mib(sum(b.numel() * b.element_size() for b in method.buffers())),
        },
        "received_mib_per_step": {name: None if count is None else _mib(count) for name, count in traffic.items()},
        "output": str(folder.path),
    }


def _ring(method, candidates):
    """The way of the ring's edges, and how many keys it keeps at the first and after the last; None for no ring."""
    ring = getattr(method, "ring", None)
    if ring is None:
        return None
    path = getattr(ring, "path", ring)  # an adaptive ring goes its path at a pace of its own
    kept = [last - first for first, last in (ring_ranks(at, path.upper, candidates) for at in (path.start, path.end))]
    return {
        "lower": [path.start, path.end],
        "upper": path.upper,
        "anneal_steps": path.steps,
        "candidates": candidates,
        "kept": kept,
    }


def _mib(count):
    return round(count / 2**20, 3)


def format_plan(config, resume=None):
    """`effective_settings` and the whole configuration as YAML text."""
    values = {"effective": effective_settings(config, resume), "config": config.to_dict()}
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=116)
