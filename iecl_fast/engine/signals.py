"""SIGINT and SIGTERM: finish the step, write a checkpoint, go."""

import signal
import threading

from iecl_fast.engine.errors import Interrupted


def leave_to_main_process(_worker):
    """DataLoader's ``worker_init_fn``: a signal to the whole group, as torchrun and a terminal send it, is for the main
    process, which takes its step to the end and needs its workers until then."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


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
        for number in (signal.SIGINT, signal.SIGTERM) if in_main_thread else ():
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
