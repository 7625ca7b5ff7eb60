"""A run that is killed over and over, and gone on with, until it is done. Started by test_kills.py as a process.

Starting Python and torch takes longer than these runs. So this process imports all, starts no thread, and forks: a
child trains, is killed, and the next child goes on. Some kills come from here, at any moment; others from the child
itself, in the middle of a write, where a moment chosen at random would hardly ever fall.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

import torch

from iecl_fast.cli import main
from iecl_fast.engine import checkpoint, pretrain  # noqa: F401  (imported here once, and not in each child)
from iecl_fast.engine.checkpoint import is_leftover, load_checkpoint
from iecl_fast.engine.folder import RunFolder
from small_runs import SMALL_RUN

ARGUMENTS = [*SMALL_RUN, "trainer.epochs=6", "trainer.checkpoint_steps=1"]
PLACES = ("any moment", "half a write", "before the rename", "any moment", "after the rename", "half a row")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly:
    """A file in whose write number `at` the process dies, when half of the bytes are written."""

    def __init__(self, file, at):
        self.file, self.left = file, at

    def write(self, data):
        self.left -= 1
        if self.left < 0:
            self.file.write(bytes(data)[: len(data) // 2])
            self.file.flush()
            die()
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


def prepare_to_die(place, chance):
    """Arrange for this process to die at a place, in one of the next few files or rows that it writes."""
    countdown = itertools.count(-chance.randrange(4))
    if place == "half a write":
        whole, at = checkpoint.whole_file, chance.randrange(40)  # a checkpoint of this run has about 100 writes

        @contextmanager
        def half_a_file(path):
            with whole(path) as file:
                yield Deadly(file, at) if path.suffix == ".ckpt" and next(countdown) >= 0 else file

        checkpoint.whole_file = half_a_file
    elif place in ("before the rename", "after the rename"):
        rename = os.replace

        def deadly(source, target):
            if next(countdown) >= 0:
                if place == "after the rename":
                    rename(source, target)
                die()
            rename(source, target)

        os.replace = deadly
    elif place == "half a row":
        from iecl_fast.engine.logging import MetricsFile

        write = MetricsFile.write

        def half_a_row(self, row):
            if next(countdown) < 0:
                return write(self, row)
            self._file.write(",".join(map(str, row.values()))[:20])
            self._file.flush()
            die()

        MetricsFile.write = half_a_row


def live(folder, log, place=None, chance=None):
    """Fork a child that begins the run in `folder` or goes on with it; its process id."""
    child = os.fork()
    if child:
        return child
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 99
    try:
        if place is not None:
            prepare_to_die(place, chance)
        begun = RunFolder(folder).config.exists()
        status = main(["pretrain", *(["--resume", str(folder)] if begun else ["--output", str(folder), *ARGUMENTS])])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def status_of(child):
    """The exit status, or minus the signal's number."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def kill_often(root, kills, seed):
    """Figures: how many kills, how many of them left a half-written file, and the runs' folders, all finished."""
    chance = random.Random(seed)
    log = root / "log.txt"
    started = time.monotonic()
    assert status_of(live(root / "whole", log)) == 0, log.read_text()
    duration = time.monotonic() - started
    figures = {"kills": 0, "half_written": 0, "steps": [], "runs": []}
    place = itertools.cycle(PLACES)
    while figures["kills"] < kills:
        folder = root / f"run{len(figures['runs'])}"
        figures["runs"].append(str(folder))
        step = -1
        while True:
            where = next(place) if figures["kills"] < kills else None
            child = live(folder, log, where, random.Random(chance.random()))
            if where == "any moment":
                time.sleep(chance.uniform(0.0, 0.5 * duration))
                os.kill(child, signal.SIGKILL)
            status = status_of(child)
            if status == 0:
                break
            assert status == -signal.SIGKILL, (status, log.read_text())
            figures["kills"] += 1
            paths = RunFolder(folder)
            if paths.path.exists():
                figures["half_written"] += any(map(is_leftover, paths.path.rglob(".*")))
            if step >= 0 or paths.checkpoint.exists():
                newest = load_checkpoint(paths.checkpoint)["step"]
                assert newest >= step, f"step {newest} after {step}"
                step = newest
            figures["steps"].append(step)
    return figures


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(kill_often(Path(sys.argv[1]), kills=int(sys.argv[2]), seed=int(sys.argv[3]))))
