"""The end of one process of a run is the end of all of them, and one says why.

A process that fails leaves the others in a collective. gloo tells them when its connections are closed, which its
DataLoader workers may hold open for five seconds more; NCCL does not tell. torchrun ends the others of its own accord.
Fabric, which starts them for `trainer.devices`, kills all when one of those that it has started fails, the first one
too and without a word, and leaves them alone when the first one fails: so the processes of one machine watch each other
here.
"""

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager

import torch.distributed as dist

from iecl_fast.engine.errors import RunError

PERIOD = 0.2  # seconds between two looks at the others
GRACE = 1.5  # seconds for a process to end by itself, and to say why, when another one has ended
PARENT = "IECL_FAST_PARENT"  # in the environment of the processes that Fabric starts
KEY = "iecl_fast/end"

_started = []  # the processes that this one has started, as Popen
_parent = None  # process id of the one that has started this one


def claim_end(status):
    """Ask, before this process ends early, whether another one of its run has done so before; end what it has started.

    Args:
        status: exit status that this process would end with.

    Returns:
        (exit status of the one that was first, whether it is this one: then it has to say why).
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        _end_others()  # which are starting, where there are some
        return status, True
    if _parent is not None:
        time.sleep(PERIOD)  # the first process goes first
        if os.getppid() != _parent:  # it has said why, or was killed
            return status, False
    own = f"{status} {dist.get_rank()} {threading.get_ident()}"
    try:
        # Public functions make another store; this one is there, also when the ranks no longer answer each other.
        first = dist.distributed_c10d._get_default_store().compare_set(KEY, "", own).decode()
    except RuntimeError:  # the process that held the store has ended
        return status, False
    speaks = first == own
    _end_others(patience=0 if speaks else GRACE)
    return int(first.split()[0]), speaks


def _end_others(patience=0):
    """End what this process has started, after seconds of patience. Only the first one writes, so nothing is lost."""
    deadline = time.monotonic() + patience
    while any(process.poll() is None for process in _started) and time.monotonic() < deadline:
        time.sleep(PERIOD)
    for process in _started:
        process.kill()
        process.wait()


@contextmanager
def lost_ranks():
    """Context in which a collective that fails, as when another process of the run has ended, is a RunError."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "/gloo/" in str(error)):
            raise
        raise RunError(
            "another process of the run has ended; if it has not said why, the system may have ended it for want of "
            "memory"
        ) from None


@contextmanager
def watched_launch(launcher, count):
    """Context in which Fabric's launcher starts the other processes of this machine, which watch each other from then.

    Ctrl-C in a terminal reaches all of them: it is the first one's affair, the others are started with it blocked.

    Args:
        launcher: of Fabric's strategy.
        count: how many processes it starts.
    """
    global _parent
    if PARENT in os.environ:
        _parent = int(os.environ.pop(PARENT))
        _watch(_until_parent_ends)
        yield
        return
    _watch(_until_one_fails, launcher.procs, count)
    os.environ[PARENT] = str(os.getpid())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        del os.environ[PARENT]


def _watch(action, *arguments):
    threading.Thread(target=action, args=arguments, daemon=True, name=action.__name__).start()


def _until_parent_ends():
    """End this process when the first one, which has started it, is no more. That one has said why, or was killed."""
    while os.getppid() == _parent:
        time.sleep(PERIOD)
    os._exit(1)


def _until_one_fails(processes, count):
    """End this process when one that it has started fails, whatever it is doing: it may wait for that one for ever."""
    while len(processes) < count:
        time.sleep(PERIOD)
    _started.extend(processes)
    processes.clear()  # Fabric's own watcher, which looks at them after five seconds, has nothing to do then
    while not any(process.poll() for process in _started):
        time.sleep(PERIOD)
    time.sleep(GRACE)
    rank, code = next((rank, process.poll()) for rank, process in enumerate(_started, start=1) if process.poll())
    status, speaks = claim_end(1)
    if speaks:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with status {code}"
        print(
            f"iecl-fast: process {rank} of the run {how}; what was written is kept, go on with: iecl-fast pretrain "
            "--resume and the run's folder",
            file=sys.stderr,
            flush=True,
        )
    else:
        time.sleep(GRACE)  # the one that speaks may be another thread of this process
    os._exit(status)
