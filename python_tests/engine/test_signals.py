"""SIGINT and SIGTERM: at once outside the loop, after the step inside it."""

import os
import signal
import threading

import pytest

from iecl_fast.engine.errors import Interrupted
from iecl_fast.engine.signals import StopSignals

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@BOTH
def test_raised_at_once_outside(number):
    with StopSignals(), pytest.raises(Interrupted, match=signal.Signals(number).name) as caught:
        os.kill(os.getpid(), number)
    assert caught.value.signal_number == number


@BOTH
def test_only_noted_inside_and_the_second_raises(number):
    with StopSignals() as signals, signals.postponed():
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), number)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_another_thread_is_left_alone():
    seen = []

    def enter():
        with StopSignals() as signals:
            seen.append(signals.received)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [None]
