"""What lies in run folders, as far as it is there: a report is made of unfinished and damaged runs too."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from iecl_fast.engine.config import flatten
from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.folder import RunFolder
from iecl_fast.engine.logging import read_metrics


@dataclass
class Run:
    """One run folder.

    Attributes:
        folder: `RunFolder`.
        config: nested dict of its config.yaml.
        result: dict of its result.json, None where the run is not finished.
        environment: dict of its environment.json, None where there is none.
        metrics: rows of its metrics.csv, dicts of numbers.
        evaluations: dict from a file's path inside the folder to what that result.json of a later evaluation holds.
        notes: sentences about what is missing or damaged.
    """

    folder: RunFolder
    config: dict
    result: dict | None = None
    environment: dict | None = None
    metrics: list = field(default_factory=list)
    evaluations: dict = field(default_factory=dict)
    notes: list = field(default_factory=list)

    @property
    def seed(self):
        return self.config.get("seed", 0)

    @property
    def state(self):
        """ "finished", or how far the run has come."""
        if self.result is not None:
            return "finished"
        if not self.metrics:
            return "unfinished: no step was logged"
        last, epochs = self.metrics[-1], flatten(self.config).get("trainer.epochs", "?")
        return f"unfinished: step {last['step']}, epoch {last.get('epoch', '?')} of {epochs}"


@dataclass
class Group:
    """Runs that differ in their seed alone, or a single run.

    Attributes:
        name: what it is called on the page, unlike that of every other group.
        runs: of ascending seed.
    """

    name: str
    runs: list

    @property
    def config(self):
        return self.runs[0].config

    @property
    def method(self):
        return str(flatten(self.config).get("method.name", "?"))

    @property
    def data(self):
        return str(flatten(self.config).get("data.name", "?"))

    @property
    def finished(self):
        return [run for run in self.runs if run.result is not None]

    def figures(self, name):
        """The values of a number of result.json, one for each finished run that has it."""
        values = [run.result.get(name) for run in self.finished]
        return [value for value in values if isinstance(value, (int, float))]

    @property
    def shown_run(self):
        """The run whose features and pictures stand for the group: the first with a checkpoint, finished if one is."""
        able = [run for run in self.runs if run.folder.checkpoint.is_file()]
        return min(able, key=lambda run: run.result is None, default=self.runs[0])


def gather(paths):
    """The groups of run folders and of sweeps' folders, in the order given; what is given twice is taken once.

    Args:
        paths: run folders, folders of `iecl-fast sweep`, or of one recipe in it.

    Returns:
        list of `Group`.

    Raises:
        UsageError: a folder is not there, or is neither.
    """
    folders, seen = [], set()
    for path in map(Path, paths):
        for members in _groups_in(path):
            new = [member for member in members if member.resolve() not in seen]
            seen.update(member.resolve() for member in new)
            if new:
                folders.append(new)
    names = _distinct_names([Path(os.path.abspath(_named_after(members))) for members in folders])
    return [Group(name, [read_run(member) for member in members]) for name, members in zip(names, folders, strict=True)]


def _groups_in(path):
    """Lists of run folders."""
    if (path / "config.yaml").is_file():
        return [[path]]
    if not path.is_dir():
        raise UsageError(f"there is no run folder {path}")
    groups = [_seeds_in(folder) for folder in (path, *sorted(path.iterdir()))]
    groups = [group for group in groups if group]
    if not groups:
        raise UsageError(
            f"{path} is no run folder, it has no config.yaml, nor a sweep's, it has no <recipe>/seed<number>/"
        )
    return groups


def _seeds_in(folder):
    """The run folders seed0, seed1, ... of a recipe."""
    if not folder.is_dir():
        return []
    seeds = [entry for entry in folder.iterdir() if entry.name.startswith("seed") and entry.name[4:].isdecimal()]
    return sorted(
        (entry for entry in seeds if (entry / "config.yaml").is_file()), key=lambda entry: int(entry.name[4:])
    )


def _named_after(members):
    is_seed = len(members) > 1 or members[0].name.startswith("seed")
    return members[0].parent if is_seed else members[0]


def _distinct_names(paths):
    """For each path its last part, and as many parts before it as tell it from the others."""
    names = []
    for path in paths:
        for length in range(1, len(path.parts) + 1):
            name = "/".join(path.parts[-length:])
            if sum(other.parts[-length:] == path.parts[-length:] for other in paths) == 1:
                break
        names.append(name)
    return names


def read_run(path):
    """A `Run`; what is missing or damaged in its folder is noted.

    Raises:
        UsageError: its config.yaml is missing or damaged.
    """
    folder = RunFolder.of_run(path)
    run = Run(folder, folder.read_config())
    if folder.result.is_file():
        run.result = _noting(run, folder.read_result)
    if folder.environment.is_file():
        run.environment = _noting(run, lambda: _read_json(folder.environment))
    if folder.metrics.is_file():
        run.metrics = _noting(run, lambda: _read_metrics(folder.metrics)) or []
    for file in sorted({*folder.path.glob("*/result.json"), *folder.path.glob("*/*/result.json")}):
        content = _noting(run, lambda file=file: _read_json(file))
        if content is not None:
            run.evaluations[str(file.parent.relative_to(folder.path))] = content
    if not folder.checkpoint.is_file():
        run.notes.append("There is no checkpoint: its features cannot be looked at.")
    return run


def _noting(run, read):
    try:
        return read()
    except (UsageError, OSError) as error:
        run.notes.append(f"{error}.")
        return None


def _read_json(path):
    try:
        content = json.loads(path.read_text(errors="replace"))
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} is damaged: it must hold names and values")
    return content


def _read_metrics(path):
    try:
        return read_metrics(path)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} is damaged: {error}") from None


def differing_settings(groups):
    """Settings in which groups differ: dict from dotted key to the list of values, one for each group.

    Left out are the folder, and the seed where the group has several; a key that a group's method does not have is
    the string "-".
    """
    flat = [flatten(group.config) for group in groups]
    for settings, group in zip(flat, groups, strict=True):
        if len(group.runs) > 1:
            settings["seed"] = [run.seed for run in group.runs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    values = {key: [settings.get(key, "-") for settings in flat] for key in keys if key != "output"}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}
