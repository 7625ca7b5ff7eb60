"""What the commands share: their parser, and small things around what the user typed and what is printed."""

import argparse
import re
import sys

from iecl_fast.engine.errors import RunError
from iecl_fast.engine.schema import did_you_mean


class Parser(argparse.ArgumentParser):
    """Prints text as it is laid out, and adds the nearest spelling to what it does not know."""

    def __init__(self, **options):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message):
        unknown = re.search(r"unrecognized arguments: ([^\s=]+)|invalid choice: '([^']*)'", message)
        if unknown:
            choices = [choice for action in self._actions for choice in action.choices or ()]
            message += did_you_mean(unknown[1] or unknown[2], [*self._option_string_actions, *choices])
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n")


def place(text):
    """An argument that names a file or folder; an empty one, as of an unset variable, is not the working directory."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed, it must name a file or folder")
    return text


def check_torchvision():
    """A torchvision of another torch fails in the middle of its own import, in words that help nobody."""
    from iecl_fast.doctor import torchvision_fault

    fault = torchvision_fault()
    if fault is not None:
        raise RunError(f"{fault}; install the torchvision that belongs to it")


def given(values):
    """A nested dict without what was not given on the command line."""
    kept = {key: given(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in kept.items() if value is not None and value != {}}
