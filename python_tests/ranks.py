"""Running a function on several processes of this machine that form a gloo group."""

import torch
import torch.distributed as dist
import torch.multiprocessing


def _run(rank, function, world_size, folder, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        torch.save(function(rank, *args), f"{folder}/result{rank}.pt")
    finally:
        dist.destroy_process_group()


def run_on_ranks(function, folder, *args, world_size=2):
    """What ``function(rank, *args)`` returned on each rank; `function` at module level, its results made of tensors."""
    torch.multiprocessing.spawn(_run, (function, world_size, folder, args), nprocs=world_size)
    return [torch.load(folder / f"result{rank}.pt") for rank in range(world_size)]
