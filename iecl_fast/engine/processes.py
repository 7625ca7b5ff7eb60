"""The processes of a run: how many, on how many machines, who started them, and Fabric around them.

One machine: `trainer.devices`, and Fabric starts the others. Several: torchrun on each, which says in its environment
how many it has started.
"""

import logging
import os
import random
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from lightning_fabric.strategies import DDPStrategy

from iecl_fast.engine import build
from iecl_fast.engine.batches import mixed_seed
from iecl_fast.engine.ending import watched_launch
from iecl_fast.engine.errors import UsageError
from iecl_fast.ssl.gather import own_buffers


@dataclass(frozen=True)
class Processes:
    """One process for each device.

    Attributes:
        nodes: machines.
        devices: on each of them.
        torchrun: whether torchrun started them.
    """

    nodes: int
    devices: int
    torchrun: bool

    @property
    def world_size(self):
        return self.nodes * self.devices


def count_processes(trainer):
    """The processes that a run with these settings has, whether or not this machine has the devices. Starts none.

    Args:
        trainer: `TrainerConfig`.

    Raises:
        UsageError: the settings are not what torchrun has started; a batch that the processes cannot share; batch norm
            over devices that cannot.
    """
    torchrun = started_by_torchrun()
    processes = _of_torchrun(trainer) if torchrun else _of_one_machine(trainer)
    count = processes.world_size
    if trainer.batch_size % count or trainer.batch_size < 2 * count:
        raise UsageError(
            f"trainer.batch_size: {trainer.batch_size} is not allowed, it must be a multiple of the number of devices, "
            f"{count}, and give each at least 2 images (batch norm)"
        )
    if trainer.sync_batch_norm and count > 1 and build.accelerator(trainer) != "cuda":
        raise UsageError(
            f"trainer.sync_batch_norm: true is not allowed with {count} devices of the kind "
            f"{build.accelerator(trainer)}, torch's SyncBatchNorm works on CUDA devices only"
        )
    return processes


def started_by_torchrun():
    return torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()


def _of_torchrun(trainer):
    nodes, devices = int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    for name, started in (("num_nodes", nodes), ("devices", devices)):
        wanted = getattr(trainer, name)
        if wanted not in (None, "auto", started):
            where = "processes on this machine" if name == "devices" else "machines' processes"
            raise UsageError(
                f"trainer.{name}: {wanted} is not allowed, torchrun has started {started} {where}: "
                f"write trainer.{name}=null"
            )
    if nodes * devices != int(os.environ["WORLD_SIZE"]):
        raise UsageError(
            f"torchrun has started {os.environ['WORLD_SIZE']} processes on {nodes} machines, {devices} on this one: "
            f"all machines must have equally many"
        )
    return Processes(nodes, devices, torchrun=True)


def _of_one_machine(trainer):
    devices = trainer.devices or 1
    if devices == "auto":
        devices = max(1, torch.cuda.device_count()) if build.accelerator(trainer) == "cuda" else 1
    return Processes(trainer.num_nodes or 1, devices, torchrun=False)


def launch_fabric(trainer):
    """A launched Fabric.

    Raises:
        UsageError: as `count_processes`; what Fabric refuses; several machines without torchrun.
    """
    processes = count_processes(trainer)
    if processes.nodes > 1 and not processes.torchrun:
        raise UsageError(
            f"trainer.num_nodes: {processes.nodes} is not allowed without torchrun, which has to run on each machine: "
            f"torchrun --nnodes {processes.nodes} ... -m iecl_fast.cli pretrain ..."
        )
    try:
        fabric = Fabric(
            accelerator=build.accelerator(trainer),
            devices=processes.devices,
            num_nodes=processes.nodes,
            strategy="auto" if processes.world_size == 1 else DDPStrategy(**own_buffers()),
            **_precision(trainer),
        )
    except (ValueError, RuntimeError, ImportError) as error:
        raise UsageError(f"trainer: {' '.join(str(error).split())}") from None
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # no banner: --dry-run says what there is
    starts_others = processes.world_size > 1 and not processes.torchrun
    with watched_launch(fabric.strategy.launcher, processes.devices - 1) if starts_others else nullcontext():
        fabric.launch()
    return fabric


def _precision(trainer):
    """Fabric's argument for the precision. By name it would take bfloat16 for float16 on a CPU, with a warning."""
    if trainer.precision == "16-mixed":
        return {"plugins": MixedPrecision("16-mixed", build.accelerator(trainer))}
    return {"precision": trainer.precision}


def on_rank_zero(fabric, action):
    """What `action()` returns on rank 0, given to every rank; its UsageError or OSError is raised on every rank."""
    outcome = None
    if fabric.is_global_zero:
        try:
            outcome = action()
        except (UsageError, OSError) as error:
            outcome = error
    outcome = fabric.broadcast(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def is_first_process():
    """Whether this process is the one that speaks, also before and after there is a process group."""
    return int(os.environ.get("RANK" if started_by_torchrun() else "LOCAL_RANK", 0)) == 0


def seed_rank(fabric, seed, step=0):
    """Seed the generators of Python, NumPy and torch: rank 0's by `seed` alone, another's by its rank and the step too.

    Ranks that draw the same numbers would draw the same negatives. A rank that joins a run at its `step` gets a state
    that no rank has had before.
    """
    if fabric.global_rank == 0:
        fabric.seed_everything(seed, verbose=False)
        return
    mixed = mixed_seed(mixed_seed(seed, fabric.global_rank), step)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.manual_seed(mixed)
