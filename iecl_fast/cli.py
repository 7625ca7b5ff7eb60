"""The command line: ``iecl-fast COMMAND``; each command is a file of `iecl_fast.commands`.

Exit status: 0 the work was done; 1 it failed; 2 it was not understood or cannot be done as asked; 130 and 143
interrupted by SIGINT and SIGTERM. What a user can cause is one message on standard error, never a traceback.
"""

import io
import sys
from importlib import import_module

from iecl_fast import __version__
from iecl_fast.commands.words import Parser
from iecl_fast.engine.ending import claim_end
from iecl_fast.engine.errors import Interrupted, RunError, UsageError

DESCRIPTION = """\
Contrastive pretraining of image encoders, with Ring negatives.

  iecl-fast pretrain              train an encoder on handwritten digits: two minutes, no download
  iecl-fast evaluate knn --checkpoint runs/NAME
  iecl-fast sweep cifar10_moco_v2 iecl_cifar10 --seeds 3      several recipes and seeds, and a table
  iecl-fast export runs/NAME --format torchvision              the encoder for other libraries
  iecl-fast report runs/NAME      one HTML page over runs: accuracies, curves, neighbours, features
  iecl-fast doctor                what was built, and what is used

Each of them explains itself: iecl-fast pretrain --help
"""

COMMANDS = ("pretrain", "evaluate", "sweep", "report", "export", "doctor")


def main(argv=None):
    """Run one command.

    Args:
        argv: the words after ``iecl-fast``; by default those of the process.

    Returns:
        int, the exit status.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):  # names of files may hold what a terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    top = Parser(prog="iecl-fast", description=DESCRIPTION, usage="iecl-fast [--help] [--version] COMMAND ...")
    top.add_argument("--version", action="version", version=f"iecl-fast {__version__}")
    top.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=", ".join(COMMANDS))
    try:
        if not argv:
            top.print_help()
            return 2
        command = import_module(f"iecl_fast.commands.{top.parse_args(argv[:1]).command}")
        command.run(command.parser().parse_intermixed_args(argv[1:]))
    except SystemExit as stop:  # argparse has printed help or an error
        return stop.code or 0
    except UsageError as error:
        return _fail(error, 2)
    except RunError as error:
        return _fail(error, 1)
    except OSError as error:
        return _fail(error, 1)
    except (Interrupted, KeyboardInterrupt) as error:
        return _fail(error, 128 + getattr(error, "signal_number", 2))
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        return _fail(f"there is not enough memory: try a smaller trainer.batch_size or network. {reason}", 1)
    return 0


def _out_of_memory(error):
    import torch

    # The CPU's allocator has no exception of its own.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def _fail(error, status):
    """Say what was wrong, but for what another process of the run has said; the exit status."""
    status, speaks = claim_end(status)
    if speaks:
        print(f"iecl-fast: {str(error) or 'interrupted'}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
