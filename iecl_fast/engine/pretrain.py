"""Pretraining: one run from its configuration to its result, and from a checkpoint on."""

from dataclasses import replace

from iecl_fast.engine import build
from iecl_fast.engine.ending import lost_ranks
from iecl_fast.engine.environment import record_environment
from iecl_fast.engine.errors import Interrupted, RunError
from iecl_fast.engine.faults import failed_compilation, lost_workers
from iecl_fast.engine.folder import find_folder
from iecl_fast.engine.loop import Loop
from iecl_fast.engine.processes import launch_fabric, on_rank_zero
from iecl_fast.engine.run import Run
from iecl_fast.engine.signals import StopSignals


def pretrain(config, resume=None):
    """Train an encoder and measure its features before and after.

    Args:
        config: `Config`.
        resume: an existing run folder to go on with, or None for a new one.

    Returns:
        (`RunFolder`, the dict that its result.json holds). A finished run that is resumed is only reported.

    Raises:
        UsageError: the folder is in the way, the configuration is not the saved one, a part refuses its options.
        RunError: the loss is no number any more, images cannot be read, a process that loads them has ended, the disk
            is full, another process of the run has ended. The last checkpoint is as it was.
        Interrupted: SIGINT or SIGTERM came; a checkpoint is written.
    """
    with build.threads(config.trainer), StopSignals() as signals:
        fabric = launch_fabric(config.trainer)
        with lost_ranks():
            folder = on_rank_zero(fabric, lambda: find_folder(config, resume))
            result = on_rank_zero(fabric, lambda: folder.read_result() if folder.result.exists() else None)
            if result is not None:
                return folder, result
            config = replace(config, output=str(folder.path))
            run = Run(config, fabric, folder)  # nothing is written before all parts are there
            on_rank_zero(fabric, lambda: _prepare_folder(folder, config, fabric))
        try:
            with lost_ranks(), lost_workers(), failed_compilation():
                run.restore_or_begin()
                Loop(run, signals).train()
                return folder, run.finish()
        except Interrupted as error:
            raise Interrupted(error.signal_number, f"{error}; {run.how_to_go_on()}") from None
        except RunError as error:
            raise RunError(f"{error}; {run.how_to_go_on()}") from None
        except OSError as error:
            raise RunError(f"{error.filename}: {error.strerror or error}; {run.how_to_go_on()}") from None


def _prepare_folder(folder, config, fabric):
    """Make a new run's folder with its configuration in it; note in either case what the run runs on."""
    if not folder.config.exists():
        folder.make(config.to_dict())
    folder.prepare()
    record_environment(folder.environment, fabric)
