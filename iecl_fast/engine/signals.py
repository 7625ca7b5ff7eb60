"""SIGINT and SIGTERM: finish the step, write a checkpoint, go."""

import os
import signal
import threading
from contextlib import contextmanager

from iecl_fast.engine.errors import Interrupted

BOTH = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Context in which SIGINT and SIGTERM interrupt at a safe point.

    Outside `postponed()` a signal raises `Interrupted` at once. Inside, the first only sets `received`, and the loop
    ends at its next step; a second one, of an impatient user, raises at once. Python handles signals in its main thread
    alone: in another thread the context does nothing.

    Attributes:
        received: the signal's number, or None.
    """

    def __init__(self):
        self.received = None
        self._postponed = False
        self._previous = {}

    def __enter__(self):
        in_main_thread = threading.current_thread() is threading.main_thread()
        for number in BOTH if in_main_thread else ():
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def postponed(self):
        return _Postponed(self)

    def _handle(self, number, _frame):
        if self._postponed and self.received is None:
            self.received = number
        else:
            raise Interrupted(number, f"stopped by {signal.Signals(number).name}")


class _Postponed:
    def __init__(self, signals):
        self._signals = signals

    def __enter__(self):
        self._signals._postponed = True

    def __exit__(self, *_):
        self._signals._postponed = False


@contextmanager
def postponed_to_the_end():
    """Context for what must not be left half done: a SIGINT or SIGTERM that comes inside is handled at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = []
    handlers = {number: signal.signal(number, lambda number, _frame: came.append(number)) for number in BOTH}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def obey_parent_alone(_worker):
    """For a process that loads images, as DataLoader's `worker_init_fn`: it leaves signals to its parent.

    Ctrl-C, torchrun and batch systems send a signal to all processes of a group. Those that load images have to go on
    as long as the training that they belong to finishes its step. When that ends, DataLoader ends them by SIGTERM.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_by_parent, daemon=True).start()


def _end_by_parent():
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
