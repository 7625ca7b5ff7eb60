"""Ctrl-C while the command line is being imported, which takes seconds, ends it with a sentence and no traceback.

An exception in the middle of an extension's import is no way out: it may come back as another one, or end the process
by abort(). Where the package is a library, or SIGINT is ignored, nothing happens here.
"""

import os
import signal
import sys


def _is_command():
    return "iecl_fast.cli" in sys.orig_argv or os.path.basename(sys.argv[0]) == "iecl-fast"


def _end_imports(number, frame):
    """During an import nothing has been begun: leave at once. Later `iecl_fast.cli` handles KeyboardInterrupt."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            if os.environ.get("RANK", "0") == "0":  # of torchrun's processes one is enough
                print("iecl-fast: interrupted", file=sys.stderr, flush=True)
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end_imports)
