"""The three ways in which a command ends early, each with its exit status."""


class UsageError(Exception):
    """What was asked for cannot be done: a wrong key or value, a missing file, a folder in the way. Exit status 2."""


class RunError(Exception):
    """The work began and could not be finished: a diverged loss, an unreadable image. Exit status 1."""


class Interrupted(Exception):
    """SIGINT or SIGTERM came. Exit status 128 + its number, as a shell reports it.

    Args:
        signal_number: the signal.
        message: where the run stands and how it goes on.
    """

    def __init__(self, signal_number, message):
        super().__init__(message)
        self.signal_number = signal_number
