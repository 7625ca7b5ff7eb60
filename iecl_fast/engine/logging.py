"""What a run writes while it goes: metrics.csv, TensorBoard events, a progress bar."""

import csv
import sys
import threading
import time
from contextlib import nullcontext, suppress

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from iecl_fast.engine.checkpoint import naming, whole_file
from iecl_fast.engine.errors import UsageError

COUNTS = ("unreadable_images", "skipped_steps")  # columns of what a run went past, the last ones


class MetricsFile:
    """metrics.csv: one row of numbers for each logged step, first column ``step``.

    Opened on an existing file, rows after `last_step` are cut off: they belong to steps that a resumed run takes again.
    Numbers are written so that reading gives the same bits back.

    Args:
        path: the file.
        last_step: of the checkpoint from which the run goes on; 0 for a new run.
        added: dict from the columns that an older version did not write, the last ones, to their value in its rows.
    """

    def __init__(self, path, last_step=0, added=None):
        try:
            lines = _with_columns(_whole_lines(path) if path.exists() else [], added or {})
            kept = lines[:1] + [line for line in lines[1:] if int(line.partition(",")[0]) <= last_step]
            _numbers(kept)  # the curves are drawn from them: a run must not find out at its end that they cannot be
        except (ValueError, TypeError):
            raise UsageError(f"{path} is damaged: it must be rows of numbers that begin with their step") from None
        with whole_file(path) as file:
            file.write("".join(kept).encode())
        self._columns = kept[0].rstrip("\n").split(",") if kept else None
        self._file = open(path, "a", newline="")  # noqa: SIM115 (closed by close)

    def write(self, row):
        """Append a row, a dict of numbers. The first row's keys are the columns.

        Raises:
            ValueError: a later row has other keys.
        """
        writer = csv.writer(self._file, lineterminator="\n")
        if self._columns is None:
            self._columns = list(row)
            writer.writerow(self._columns)
        if list(row) != self._columns:
            raise ValueError(f"the columns of {self._file.name} are {self._columns}, a row has {list(row)}")
        writer.writerow(row.values())
        with naming(self._file.name):
            self._file.flush()

    def close(self):
        self._file.close()


def read_metrics(path):
    """The rows of metrics.csv as dicts of floats. A last line that was cut short by a kill is left out.

    Returns:
        list of dict from column to float; "step" and "epoch" are ints.
    """
    return _numbers(_whole_lines(path))


def _numbers(lines):
    return [
        {key: int(value) if key in ("step", "epoch") else float(value) for key, value in row.items()}
        for row in csv.DictReader(lines)
    ]


def _with_columns(lines, added):
    """Lines whose header lacks the added columns, with these."""
    if not lines or set(added) <= set(lines[0].rstrip("\n").split(",")):
        return lines
    ends = [",".join(added), *[",".join(map(str, added.values()))] * (len(lines) - 1)]
    return [line.rstrip("\n") + f",{end}\n" for line, end in zip(lines, ends)]


def _whole_lines(path):
    with open(path, newline="") as file:
        return [line for line in file if line.endswith("\n")]


class RunLog:
    """The three logs behind one call.

    Args:
        folder: `RunFolder`.
        step, total_steps: steps taken already, and of the whole run.
        images_per_step: for the progress bar's rate.
        progress: whether to show the bar.
    """

    def __init__(self, folder, *, step, total_steps, images_per_step, progress):
        self._metrics = MetricsFile(folder.metrics, last_step=step, added=dict.fromkeys(COUNTS, 0))
        self._tensorboard = SummaryWriter(folder.tensorboard, purge_step=step + 1)
        self._images_per_step = images_per_step
        self._written_step, self._written_at = step, time.perf_counter()
        self._bar = tqdm(
            total=total_steps * images_per_step,
            initial=step * images_per_step,
            unit="img",
            unit_scale=True,
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 10.0,  # a log file is not to fill with bars
            disable=not progress,
        )

    def advance(self):
        """One step was taken."""
        self._bar.update(self._images_per_step)

    def write(self, step, epoch, learning_rate, values):
        """Log a step.

        Args:
            step: counted from 1. epoch: counted from 1.
            learning_rate: of this step.
            values: dict of floats: "loss" and what else the method gives.
        """
        self._metrics.write({"step": step, "epoch": epoch, "learning_rate": learning_rate, **values})
        now = time.perf_counter()
        images = (step - self._written_step) * self._images_per_step
        rates = {"learning_rate": learning_rate, "images_per_second": images / (now - self._written_at)}
        with naming(self._tensorboard.log_dir):
            for name, value in (values | rates).items():
                self._tensorboard.add_scalar(name, value, step)
        self._written_step, self._written_at = step, now
        self._bar.set_description(f"epoch {epoch}", refresh=False)
        self._bar.set_postfix(loss=f"{values['loss']:.4f}", refresh=False)

    def write_picture(self, step, name, picture):
        """Give TensorBoard a picture (3, H, W) in 0..1."""
        with naming(self._tensorboard.log_dir):
            self._tensorboard.add_image(name, picture, step)

    def __enter__(self):
        self._hook = threading.excepthook
        threading.excepthook = self._quiet_hook
        return self

    def _quiet_hook(self, arguments):
        """TensorBoard's thread hands its failure to write on to this one: it need not print a traceback besides."""
        if not isinstance(arguments.exc_value, OSError):
            self._hook(arguments)

    def __exit__(self, kind, *_):
        threading.excepthook = self._hook
        self._bar.close()
        # On a full disk closing fails once more, and would hide what came first.
        with suppress(OSError) if kind is not None else nullcontext():
            self._metrics.close()
            self._tensorboard.close()
