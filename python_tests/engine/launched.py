"""Runs on several processes, each as torchrun would start it, in processes that are spawned once for all of them."""

import contextlib
import os
import socket
import time
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from iecl_fast.cli import main
from iecl_fast.engine import build
from iecl_fast.engine.logging import RunLog
from test_pretrain import kill_at

PATIENCE = 300  # seconds until a process that hears nothing gives up


class Pixels(nn.Module):
    """A backbone without batch norm, for images of 8 x 8: what it computes does not depend on the number of ranks."""

    feature_dim = 16

    def __init__(self, *_):
        super().__init__()
        self.linear = nn.Linear(3 * 8 * 8, 16)

    def forward(self, images):
        return self.linear(images.flatten(1)).tanh()


def _environment(rank, size, port):
    """What torchrun sets; of one process nothing."""
    if size == 1:
        return {}
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
    sizes = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_WORLD_SIZE": 1}
    values = ranks | sizes | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    return {name: str(value) for name, value in values.items()}


@contextlib.contextmanager
def _noting(seen):
    """Context in which a run's backbone is `Pixels`, and each forward pass of its method is noted in a list."""

    def note(method, arguments):
        seen.append(
            {
                "step": int(method.step),
                "index": arguments[1].clone(),
                "queue": method.queue.keys.clone(),
                "rng": torch.get_rng_state(),
                "state": {name: value.clone() for name, value in method.state_dict().items()} if not seen else {},
            }
        )

    def noted_method(*arguments, **options):
        method = original(*arguments, **options)
        method.register_forward_pre_hook(note)
        return method

    original = build.method
    with mock.patch.object(build, "build_backbone", Pixels), mock.patch.object(build, "method", noted_method):
        yield


def _take_part(rank, number, phase, folder):
    """One phase: a run's command, or a function of this module's user. Returns its status and what was noted."""
    deadline = time.monotonic() + PATIENCE
    while not (folder / f"phase{number}").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"phase {number} has not begun")
        time.sleep(0.02)
    size, work, stop = phase
    seen = []
    if rank >= size:
        return {"result": None, "seen": seen}
    environment = _environment(rank, size, (folder / f"phase{number}").read_text())
    with mock.patch.dict(os.environ, environment), contextlib.ExitStack() as stack:
        if callable(work):
            dist.init_process_group("gloo")
            result = work(rank)
        else:
            stack.enter_context(_noting(seen))
            if stop is not None and rank == 0:
                stack.enter_context(mock.patch.object(RunLog, "write", kill_at(*stop)))
            result = main(work)
        if dist.is_initialized():
            dist.destroy_process_group()
    return {"result": result, "seen": seen}


def _child(child, phases, folder):
    torch.set_num_threads(1)
    results = [_take_part(child + 1, number, phase, folder) for number, phase in enumerate(phases)]
    torch.save(results, folder / f"rank{child + 1}.pt")


def run_phases(phases, folder, before=lambda number: None):
    """Several runs one after the other.

    Args:
        phases: list of (processes, command line of a run or function of the rank, (step, signal) of rank 0 or None).
        folder: the test's own.
        before: called with a phase's number before it begins.

    Returns:
        for each phase the list of its ranks' {"result": exit status or returned, "seen": forward passes}.
    """
    children = torch.multiprocessing.spawn(
        _child, (phases, folder), nprocs=max(size for size, *_ in phases) - 1, join=False
    )
    try:
        results = []
        for number, phase in enumerate(phases):
            before(number)
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            (folder / "next").write_text(str(port))
            (folder / "next").rename(folder / f"phase{number}")
            results.append(_take_part(0, number, phase, folder))
        while not children.join():
            pass
    finally:
        for process in children.processes:  # after an error here they would wait for this rank
            process.kill()
    ranks = [results] + [torch.load(folder / f"rank{rank + 1}.pt") for rank in range(len(children.processes))]
    return [[of_rank[number] for of_rank in ranks[:size]] for number, (size, *_) in enumerate(phases)]
