"""Running a function on several processes of this machine that form a gloo group."""

import datetime

import torch
import torch.distributed as dist
import torch.multiprocessing

TIMEOUT = datetime.timedelta(seconds=300)  # a rank that died must not keep the others waiting


def _run(rank, function, world_sizes, folder, args):
    results = {}
    for size in world_sizes:
        if rank >= size:
            continue
        store = f"file://{folder}/store{size}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=TIMEOUT)
        try:
            results[size] = function(rank, *args)
        finally:
            dist.destroy_process_group()
    return results


def _run_child(child, *arguments):
    torch.set_num_threads(1)
    torch.save(_run(child + 1, *arguments), f"{arguments[2]}/result{child + 1}.pt")


def run_on_group_sizes(function, folder, *args, world_sizes):
    """What ``function(rank, *args)`` returned on each rank in groups of several sizes, one after the other.

    Rank 0 is this process, so that coverage sees it; the others are spawned, once. `function` lives at module level and
    its results are made of tensors. `folder` is the test's own.

    Returns:
        dict from size to the list of the ranks' results.
    """
    arguments = (function, world_sizes, folder, args)
    children = torch.multiprocessing.spawn(_run_child, arguments, nprocs=max(world_sizes) - 1, join=False)
    try:
        results = [_run(0, *arguments)]
        while not children.join():
            pass
    finally:
        for process in children.processes:  # after an error here they would wait for this rank
            process.kill()
    results += [torch.load(folder / f"result{rank}.pt") for rank in range(1, max(world_sizes))]
    return {size: [result[size] for result in results[:size]] for size in world_sizes}


def run_on_ranks(function, folder, *args, world_size=2):
    """The same for one group: a list."""
    return run_on_group_sizes(function, folder, *args, world_sizes=(world_size,))[world_size]
