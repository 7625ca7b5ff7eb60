"""``python -m bench.report``: every comparison of this machine in one run, as Markdown tables with ratios."""

import argparse
import importlib
import platform

import torch

import iecl_fast  # noqa: F401  (registers the operators)

ROOMS = ("ring", "saib", "spectral")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("rooms", nargs="*", default=ROOMS, help=f"which comparisons: {', '.join(ROOMS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=9, help="how often each is run (default: 9)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of PyTorch")
    parser.add_argument("--compile", action="store_true", help="also compare with torch.compile(mode='max-autotune')")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    instruction_set = torch.ops.iecl_fast._instruction_set()
    print(f"{platform.processor() or platform.machine()}, {instruction_set}, {arguments.threads} threads, ", end="")
    print(f"torch {torch.__version__}. Medians of {arguments.rounds} interleaved rounds.\n")
    for room in arguments.rooms:
        for table in importlib.import_module(f"bench.{room}.report").tables(arguments.rounds, arguments.compile):
            print(table, flush=True)


if __name__ == "__main__":
    main()
