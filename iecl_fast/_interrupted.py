"""Ctrl-C while the command line is still being imported, torch above all, ends it with a sentence and no traceback.

Later `iecl_fast.cli` handles it. Where the package is a library nothing happens here.
"""

import os
import sys


def _is_command():
    return "iecl_fast.cli" in sys.orig_argv or os.path.basename(sys.argv[0]) == "iecl-fast"


def _say_interrupted(kind, error, traceback):
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
    elif os.environ.get("RANK", "0") == "0":  # of torchrun's processes one is enough
        print("iecl-fast: interrupted", file=sys.stderr)


if _is_command():
    sys.excepthook = _say_interrupted
