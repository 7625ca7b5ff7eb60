"""Pretraining: one run from its configuration to its result, and from a checkpoint on."""

from dataclasses import replace

from iecl_fast.engine import build
from iecl_fast.engine.checkpoint import load_checkpoint
from iecl_fast.engine.config import differences
from iecl_fast.engine.environment import record_environment
from iecl_fast.engine.errors import Interrupted, RunError, UsageError
from iecl_fast.engine.faults import failed_compilation, lost_workers
from iecl_fast.engine.folder import RunFolder, default_output
from iecl_fast.engine.launch import launch_fabric, on_rank_zero
from iecl_fast.engine.loop import Loop
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
            is full. The last checkpoint is as it was.
        Interrupted: SIGINT or SIGTERM came; a checkpoint is written.
    """
    with build.threads(config.trainer), StopSignals() as signals:
        fabric = launch_fabric(config.trainer)
        folder = on_rank_zero(fabric, lambda: _find_folder(config, resume))
        if folder.result.exists():
            return folder, folder.read_result()
        config = replace(config, output=str(folder.path))
        run = Run(config, fabric, folder)  # nothing is written before all parts are there
        on_rank_zero(fabric, lambda: _prepare_folder(folder, config, fabric))
        try:
            with lost_workers(), failed_compilation():
                run.restore_or_begin()
                Loop(run, signals).train()
                return folder, run.finish()
        except Interrupted as error:
            raise Interrupted(error.signal_number, f"{error}; {run.how_to_go_on()}") from None
        except RunError as error:
            raise RunError(f"{error}; {run.how_to_go_on()}") from None
        except OSError as error:
            raise RunError(f"{error.filename}: {error.strerror or error}; {run.how_to_go_on()}") from None


def _find_folder(config, resume):
    """A folder for a new run, not made yet, or the one to resume if its configuration is this one."""
    if resume is None:
        return RunFolder.for_new_run(config.output or default_output(config))
    folder = RunFolder.of_run(resume)
    saved = load_checkpoint(folder.checkpoint)["config"] if folder.checkpoint.exists() else folder.read_config()
    if changed := differences(saved, config.to_dict()):
        lines = "".join(f"\n  {key}: the run has {old!r}, asked for is {new!r}" for key, old, new in changed)
        raise UsageError(f"{resume} cannot be resumed with another configuration:{lines}")
    return folder


def _prepare_folder(folder, config, fabric):
    """Make a new run's folder with its configuration in it; note in either case what the run runs on."""
    if not folder.config.exists():
        folder.make(config.to_dict())
    folder.prepare()
    record_environment(folder.environment, fabric)
