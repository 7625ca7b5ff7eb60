"""Runs on two processes, of which one fails, is killed or gets a signal. Started by test_ended_runs.py as a process.

Starting Python and torch takes longer than these runs. So this process imports all and forks: for each case the first
process of a run, which, where Fabric starts the second one, forks that.
"""

import json
import os
import resource
import signal
import sys
import time
import traceback
from contextlib import contextmanager, nullcontext
from pathlib import Path
from subprocess import Popen
from unittest import mock

import psutil
import torch
from lightning_fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from iecl_fast.cli import main
from iecl_fast.data.views import ViewsDataset
from iecl_fast.engine import checkpoint, pretrain, run  # noqa: F401  (imported here once, and not in each child)
from iecl_fast.engine.checkpoint import is_leftover, load_checkpoint
from iecl_fast.engine.folder import RunFolder
from iecl_fast.engine.loop import Loop
from small_runs import SMALL_RUN

RUN = [*SMALL_RUN, "data.limit=16", "trainer.epochs=2", "data.workers=1", "trainer.accelerator=cpu"]  # 4 steps
AT = 3  # the step in which something happens; the checkpoint before is of step 2
PATIENCE = 60  # seconds; what is not over then hangs


def rank():
    return int(os.environ.get("LOCAL_RANK", 0))


def send(number, everybody=False):
    if everybody:
        os.killpg(0, number)
    else:
        os.kill(os.getpid(), number)


def at_step(of_rank, action):
    """Patch the training: one process does something in a step."""

    def optimize(self, *arguments):
        if self.run.step == AT - 1 and rank() == of_rank:
            action()
        return original(self, *arguments)

    original = Loop._optimize
    return mock.patch.object(Loop, "_optimize", optimize)


def unreadable(of_rank):
    def item(self, index):
        if rank() == of_rank and int(self._epoch) == 1:
            raise OSError(f"{index}.png: no image")
        return original(self, index)

    original = ViewsDataset.__getitem__
    return mock.patch.object(ViewsDataset, "__getitem__", item)


def in_first_evaluation(action):
    def measure(*arguments, **options):
        action()
        return original(*arguments, **options)

    original = run.measure
    return mock.patch.object(run, "measure", measure)


def in_first_write(action):
    """In the middle of the first checkpoint."""

    class File:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            if self.file.tell() > 10_000:
                action()
            return self.file.write(data)

        def __getattr__(self, name):
            return getattr(self.file, name)

    @contextmanager
    def half(path):
        with whole(path) as file:
            yield File(file) if path.suffix == ".ckpt" else file

    whole = checkpoint.whole_file
    return mock.patch.object(checkpoint, "whole_file", half)


def no_longer_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def workers_die():
    for worker in psutil.Process().children():
        worker.kill()
        worker.wait()


# By name: processes, what happens, further settings.
CASES = {
    "full disk": (2, lambda: at_step(0, no_longer_files), ["trainer.checkpoint_steps=1", "data.workers=0"]),
    "unreadable": (2, lambda: unreadable(1), ["data.max_unreadable=0"]),
    "worker killed": (2, lambda: at_step(1, workers_die), []),
    "first killed": (2, lambda: at_step(0, lambda: send(signal.SIGKILL)), ["data.workers=0"]),
    "second killed": (2, lambda: at_step(1, lambda: send(signal.SIGKILL)), []),
    "second terminated": (2, lambda: at_step(1, lambda: send(signal.SIGTERM)), []),
    "all terminated": (2, lambda: at_step(0, lambda: send(signal.SIGTERM, everybody=True)), []),
    "interrupted": (2, lambda: at_step(0, lambda: send(signal.SIGINT, everybody=True)), []),
    "interrupted measuring": (1, lambda: in_first_evaluation(lambda: send(signal.SIGINT, everybody=True)), []),
    "interrupted writing": (1, lambda: in_first_write(lambda: send(signal.SIGINT, everybody=True)), []),
}


def live(arguments, happening):
    """What a forked process does: its status is that of the run."""
    status = 99
    try:
        with happening():
            status = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


class Forked(Popen):
    """The forked second process, as Fabric's launcher keeps what it has started."""

    def __init__(self, pid):
        with mock.patch.object(Popen, "_execute_child", lambda popen, *_: setattr(popen, "pid", pid)):
            super().__init__(["second"])


def start(folder, processes, happening, overrides, log):
    """Fork the first process of a run, as the leader of a group, which is what a terminal sends Ctrl-C to."""
    child = os.fork()
    if child:
        return child
    os.setpgid(0, 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    arguments = ["pretrain", "--output", str(folder), *RUN, *overrides, f"trainer.devices={processes}"]

    def call_children_scripts(launcher):
        port = str(launcher.cluster_environment.main_port)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0", "WORLD_SIZE": "2"}
        second = os.fork()
        os.environ["LOCAL_RANK"] = "0" if second else "1"
        if second:
            launcher.procs.append(Forked(second))
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a new process
        live(arguments, nullcontext)  # the patches are there already

    _SubprocessScriptLauncher._call_children_scripts = call_children_scripts
    live(arguments, happening)


def group(leader):
    """The processes of a group that run."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def look_at(name, root):
    """Let a case happen. What came of it: status, lines, seconds from the end of the first process to that of the last
    one, how many never ended, the checkpoint's step, whether a file was left half written."""
    processes, happening, overrides = CASES[name]
    folder, log = RunFolder(root / name), root / f"{name}.txt"
    leader = start(folder.path, processes, happening, overrides, log)
    deadline = time.monotonic() + PATIENCE
    status = None
    while status is None and time.monotonic() < deadline:
        time.sleep(0.02)
        ended, code = os.waitpid(leader, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
    since = time.monotonic()
    while (left := group(leader)) and time.monotonic() < since + 10:
        time.sleep(0.1)
    seconds = time.monotonic() - since
    for process in left:
        os.kill(process, signal.SIGKILL)
    return {
        "status": status,
        "lines": log.read_text().splitlines(),
        "seconds": seconds,
        "left": len(left),
        "step": load_checkpoint(folder.checkpoint)["step"] if folder.checkpoint.exists() else None,
        "half_written": any(map(is_leftover, folder.path.rglob(".*"))),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: look_at(name, Path(sys.argv[1])) for name in sys.argv[2:] or CASES}))
