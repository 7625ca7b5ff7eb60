"""A bank spread over ranks: bytes that a rank receives for a query, and what a step costs, beside one process.

    python -m bench.ring.sharded [--keys 1281167] [--ranks 1 2 3] [--queries 256]

The ranks are processes of this machine that form a gloo group. The traffic is that of a network, waiting is not: so the
cost is the time of a processor, of one thread. Queries are of all ranks together.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from iecl_fast import ring_info_nce, ring_sample
from iecl_fast.ring import sharded

sys.path.insert(0, str(Path(__file__).parents[2] / "python_tests"))
from traffic import counted_traffic

from ranks import run_on_ranks

SAMPLES = 4096


def unit_rows(rows, channels, seed):
    return F.normalize(torch.randn(rows, channels, generator=torch.Generator().manual_seed(seed)), dim=1)


def steps(info_nce, sample, queries, keys):
    """Name to a function that does a step, forward and backward."""

    def loss():
        query = queries.clone().requires_grad_()
        info_nce(query, queries.roll(1, 0), keys, lower=90, upper=99).backward()

    def draws():
        query = queries.clone().requires_grad_()
        sample(query, keys, 90, 99, num_samples=SAMPLES).sum().backward()

    return {"ring_info_nce": loss, f"ring_sample, {SAMPLES} draws": draws}


def measure_rank(rank, ranks, num_queries, num_keys, channels):
    """For each step bytes that came for a query, collectives, and seconds of a processor."""
    torch.set_num_threads(1)
    keys = unit_rows((rank + 1) * num_keys // ranks - rank * num_keys // ranks, channels, rank)
    queries = unit_rows(num_queries // ranks, channels, 100 + rank)
    results = []
    for step in steps(sharded.ring_info_nce, sharded.ring_sample, queries, keys).values():
        with counted_traffic() as traffic:
            step()
        start = time.process_time()
        step()
        seconds = time.process_time() - start
        results.append([traffic.bytes / (len(queries) * ranks), traffic.calls, seconds])
    return torch.tensor(results, dtype=torch.float64)


def one_process(num_queries, num_keys, channels):
    """Seconds of a processor for each step with all keys."""
    torch.set_num_threads(1)
    seconds = []
    for step in steps(
        ring_info_nce, ring_sample, unit_rows(num_queries, channels, 100), unit_rows(num_keys, channels, 0)
    ).values():
        step()
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=1_281_167, help="K (default: ImageNet's 1281167)")
    parser.add_argument("--channels", type=int, default=128, help="C (default: 128)")
    parser.add_argument("--queries", type=int, default=256, help="N of all ranks together (default: 256)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3], help="processes (default: 1 2 3)")
    options = parser.parse_args()
    shape = options.queries, options.keys, options.channels
    print(f"N={shape[0]}, K={shape[1]}, C={shape[2]}, float32, ring 90..99, forward and backward\n")
    print("| | ranks | KB a query | collectives | processor seconds of a rank | of one process with all keys |")
    print("|---|---|---|---|---|---|")
    alone = one_process(*shape)
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            of_ranks = run_on_ranks(measure_rank, Path(folder), ranks, *shape, world_size=ranks)
        worst = torch.stack(of_ranks).amax(dim=0).tolist()
        names = ("ring_info_nce", f"ring_sample, {SAMPLES} draws")
        for name, (received, calls, seconds), before in zip(names, worst, alone):
            print(f"| {name} | {ranks} | {received / 1000:.1f} | {calls:.0f} | {seconds:.2f} | {before:.2f} |")


if __name__ == "__main__":
    main()
