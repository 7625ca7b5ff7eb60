"""The run folder: where each thing lies, and that nothing in it is overwritten."""

import json
import os
from datetime import datetime
from pathlib import Path

import yaml

from iecl_fast.engine.checkpoint import is_leftover, load_checkpoint, remove_leftovers, whole_file
from iecl_fast.engine.config import differences, parse_yaml, resolve
from iecl_fast.engine.errors import UsageError


class RunFolder:
    """Paths of a run's files.

    ``config.yaml`` ``environment.json`` ``metrics.csv`` ``curves.png`` ``views.png`` ``result.json``
    ``checkpoints/last.ckpt`` ``tensorboard/``

    Args:
        path: the folder.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.csv"
        self.curves = self.path / "curves.png"
        self.views = self.path / "views.png"
        self.result = self.path / "result.json"
        self.checkpoint = self.path / "checkpoints" / "last.ckpt"
        self.tensorboard = self.path / "tensorboard"

    @classmethod
    def for_new_run(cls, path):
        """A folder that is free: not there, or empty but for what a killed beginning left. Nothing is made yet.

        Raises:
            UsageError: there is something already.
        """
        folder = cls(path)
        if folder.path.exists() and not (folder.path.is_dir() and all(map(is_leftover, folder.path.iterdir()))):
            advice = f"go on with it by --resume {path}, or name" if folder.config.exists() else "name"
            raise UsageError(f"{path} exists already and is not overwritten: {advice} another folder with --output")
        return folder

    @classmethod
    def of_run(cls, path):
        """The folder of a run that was begun.

        Raises:
            UsageError: there is none, or nothing of a run in it.
        """
        folder = cls(path)
        if not folder.path.is_dir():
            raise UsageError(f"there is no run folder {path}")
        if not folder.config.is_file():
            raise UsageError(f"{path} is no run folder: it has no config.yaml")
        return folder

    def make(self, config):
        """Make the folder with the run's configuration in it, a nested dict of plain values.

        The configuration is what makes a folder a run's: before it is there, the folder counts as free.

        Raises:
            UsageError: the system does not let it be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"the run folder {self.path} cannot be made: {error.strerror}") from None
        with whole_file(self.config) as file:
            file.write(yaml.safe_dump(config, sort_keys=False, default_flow_style=None).encode())

    def prepare(self):
        """Make a begun run's folder ready to go on in: what is missing in it is made, leftovers of a kill removed."""
        self.checkpoint.parent.mkdir(exist_ok=True)
        remove_leftovers(self.path, self.checkpoint.parent)

    def read_config(self):
        """The nested dict that config.yaml holds."""
        return parse_yaml(self.config.read_text(errors="replace"), self.config)

    def read_result(self):
        """The dict that result.json holds."""
        try:
            result = json.loads(self.result.read_text())
        except ValueError as error:
            raise UsageError(f"{self.result} is damaged: {error}") from None
        if not isinstance(result, dict) or "knn_top1" not in result:
            raise UsageError(f"{self.result} is damaged: it must hold the accuracies of a run")
        return result


def check_writable(path):
    """Refuse a file or folder for ``--output`` that could not be made: hours of work are not to end with that.

    Raises:
        UsageError: it, or what is above it, is no folder or cannot be written to.
    """
    whole = Path(path).absolute()
    above = next(place for place in (whole, *whole.parents) if place.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UsageError(f"--output: {path} is not allowed, {above} is no folder that can be written to")


def check_new_file(path):
    """Refuse a file for ``--output`` that is there already, a dangling link included, or could not be made.

    Raises:
        UsageError: either.
    """
    if os.path.lexists(path):
        raise UsageError(f"{path} exists already and is not overwritten: name another file with --output")
    check_writable(path)


def write_json(path, values):
    """Write plain values, whole or not at all."""
    with whole_file(path) as file:
        file.write((json.dumps(values, indent=2) + "\n").encode())


def default_output(config):
    """``runs/<method>-<data>-<time>`` under the working directory."""
    data = Path(config.data.name).name
    return f"runs/{config.method['name']}-{data}-{datetime.now():%Y%m%d-%H%M%S}"


def find_folder(config, resume):
    """A folder for a new run, not made yet, or the one to resume if its configuration is this one.

    Args:
        config: `Config`.
        resume: an existing run folder, or None for a new one.

    Raises:
        UsageError: the folder is in the way, is no run's, or its run has another configuration.
    """
    if resume is None:
        return RunFolder.for_new_run(config.output or default_output(config))
    folder = RunFolder.of_run(resume)
    saved = load_checkpoint(folder.checkpoint)["config"] if folder.checkpoint.exists() else folder.read_config()
    saved = resolve(saved).to_dict()  # with the values of keys that came after it
    if changed := differences(saved, config.to_dict()):
        lines = "".join(f"\n  {key}: the run has {old!r}, asked for is {new!r}" for key, old, new in changed)
        raise UsageError(f"{resume} cannot be resumed with another configuration:{lines}")
    return folder
