"""Running a function on several processes of this machine that form a gloo group."""

import datetime

import torch
import torch.distributed as dist
import torch.multiprocessing

TIMEOUT = datetime.timedelta(seconds=120)  # a rank that died must not keep the others waiting


def _run(rank, function, world_size, folder, args):
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    try:
        return function(rank, *args)
    finally:
        dist.destroy_process_group()


def _run_child(child, *arguments):
    torch.set_num_threads(1)
    torch.save(_run(child + 1, *arguments), f"{arguments[2]}/result{child + 1}.pt")


def run_on_ranks(function, folder, *args, world_size=2):
    """What ``function(rank, *args)`` returned on each rank, in a list.

    Rank 0 is this process, so that coverage sees it; the others are spawned. `function` lives at module level and its
    results are made of tensors. `folder` is the test's own.
    """
    arguments = (function, world_size, folder, args)
    children = torch.multiprocessing.spawn(_run_child, arguments, nprocs=world_size - 1, join=False)
    results = [_run(0, *arguments)]
    while not children.join():
        pass
    return results + [torch.load(folder / f"result{rank}.pt") for rank in range(1, world_size)]
