"""``python -m bench.report``: every comparison of this machine in one run, as Markdown tables with ratios."""

import argparse
import importlib
import json
import platform
from pathlib import Path

import torch

import iecl_fast  # noqa: F401  (registers the operators)
from bench.measure import Table

ROOMS = ("ring", "saib", "spectral", "step")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("rooms", nargs="*", default=ROOMS, help=f"which comparisons: {', '.join(ROOMS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=9, help="how often each is run (default: 9)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of PyTorch")
    parser.add_argument("--compile", action="store_true", help="also compare with torch.compile(mode='max-autotune')")
    parser.add_argument("--json", type=Path, help="also write every round's seconds to this file")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    if torch.cuda.is_available():
        machine = torch.cuda.get_device_name()
    else:
        instruction_set = torch.ops.iecl_fast._instruction_set()
        machine = f"{platform.processor() or platform.machine()}, {instruction_set}, {arguments.threads} threads"
    machine += f", torch {torch.__version__}"
    print(f"{machine}. Medians of {arguments.rounds} interleaved rounds.\n")
    records = []
    for room in arguments.rooms:
        for part in importlib.import_module(f"bench.{room}.report").tables(arguments.rounds, arguments.compile):
            if isinstance(part, Table):
                records.append(part.record())
                part = part.markdown()
            print(part, flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine, "tables": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
