"""What lies in run folders, as far as it is there: a report is made of unfinished and damaged runs too."""

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from iecl_fast.engine.config import flatten
from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.folder import RunFolder
from iecl_fast.engine.logging import read_metrics


@dataclass
class Evaluation:
    """What `iecl-fast evaluate` has left.

    Attributes:
        name: of its folder.
        folder: `Path`.
        results: the dicts of its result.json, one for each data set.
    """

    name: str
    folder: Path
    results: list


@dataclass
class Run:
    """One run folder.

    Attributes:
        folder: `RunFolder`.
        config: nested dict of its config.yaml.
        result: dict of its result.json, None where the run is not finished.
        environment: dict of its environment.json, None where there is none.
        metrics: rows of its metrics.csv, dicts of numbers.
        evaluations: list of `Evaluation`: those in folders inside the run's, and others of its checkpoint.
        notes: sentences about what is missing or damaged.
    """

    folder: RunFolder
    config: dict
    result: dict | None = None
    environment: dict | None = None
    metrics: list = field(default_factory=list)
    evaluations: list = field(default_factory=list)
    notes: list = field(default_factory=list)

    @property
    def seed(self):
        return self.config.get("seed", 0)

    @property
    def state(self):
        """How far the run has come, in words; "finished" at its end."""
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
        return [value for value in values if isinstance(value, (int, float)) and math.isfinite(value)]

    @property
    def shown_run(self):
        """The run whose features and pictures stand for the group: the first with a checkpoint, finished if one is."""
        able = [run for run in self.runs if run.folder.checkpoint.is_file()]
        return min(able, key=lambda run: run.result is None, default=self.runs[0])


def gather(paths):
    """The runs in folders, in the order given; what is given twice is taken once, a recipe's seeds make one group.

    Args:
        paths: run folders, folders that hold some, as that of `iecl-fast sweep`, folders of `iecl-fast evaluate`.

    Returns:
        (list of `Group`, list of `Evaluation` of checkpoints that are none of theirs).

    Raises:
        UsageError: a folder is not there, or is none of these.
    """
    members, evaluated, seen = {}, [], set()
    for path in map(Path, paths):
        if (path / "config.yaml").is_file():
            found = [([path], 1)]
        elif not path.is_dir():
            raise UsageError(f"there is no run folder {path}")
        elif (path / "result.json").is_file():
            found = []
            if path.resolve() not in seen:
                seen.add(path.resolve())
                evaluated.append(read_evaluation(path, path.resolve().name))
        else:
            found = _groups_in(path)
        for folders, depth in found:
            new = [folder for folder in folders if folder.resolve() not in seen]
            seen.update(folder.resolve() for folder in new)
            if new:
                members.setdefault(_named_after(new[0]).resolve(), ([], depth))[0].extend(new)
    members = [(sorted(folders, key=_by_seed), depth) for folders, depth in members.values()]
    names = _distinct_names([(Path(os.path.abspath(_named_after(folders[0]))), depth) for folders, depth in members])
    runs = [[read_run(folder) for folder in folders] for folders, _ in members]
    loose = [
        evaluation
        for evaluation in evaluated
        if not _give_to_its_run(evaluation, [run for group in runs for run in group])
    ]
    return [Group(name, group) for name, group in zip(names, runs, strict=True)], loose


def _give_to_its_run(evaluation, runs):
    """Add an evaluation to the run whose checkpoint it is of; False where there is none."""
    of = Path(str(evaluation.results[0].get("checkpoint")) if evaluation.results else "").resolve()
    for run in runs:
        if run.folder.checkpoint.resolve() == of:
            if all(evaluation.folder.resolve() != known.folder.resolve() for known in run.evaluations):
                run.evaluations.append(evaluation)
            return True
    return False


def _groups_in(path):
    """The runs anywhere in a folder: (folders of ascending seed, parts of the name) of each recipe and of each run."""
    groups = {}
    for folder in sorted((file.parent for file in path.rglob("config.yaml")), key=_by_seed):
        groups.setdefault(_named_after(folder), []).append(folder)
    if not groups:
        raise UsageError(
            f"{path} is no run folder, it has no config.yaml, nor a sweep's, it has no <recipe>/seed<number>/"
        )
    order = _order_of_sweep(path)
    labels = {parent: parent.relative_to(path).as_posix() for parent in groups}
    parents = sorted(groups, key=lambda parent: (order.get(labels[parent], len(order)), labels[parent]))
    return [(groups[parent], max(1, len(parent.relative_to(path).parts))) for parent in parents]


def _order_of_sweep(path):
    """Places of the recipes in a sweep's summary: the order in which they were asked for."""
    try:
        return {label: place for place, label in enumerate(_read_json(path / "summary.json"))}
    except (UsageError, OSError):
        return {}


def _is_seed(folder):
    return folder.name.startswith("seed") and folder.name[4:].isdecimal()


def _by_seed(folder):
    return (int(folder.name[4:]) if _is_seed(folder) else 0, str(folder))


def _named_after(folder):
    """A run folder, or the recipe's that it is a seed of."""
    return folder.parent if _is_seed(folder) else folder


def _distinct_names(paths):
    """For each (path, number) that many last parts of the path, and as many before them as tell it from the others."""
    names = []
    for path, depth in paths:
        for length in range(depth, len(path.parts) + 1):
            name = "/".join(path.parts[-length:])
            if sum(other.parts[-length:] == path.parts[-length:] for other, _ in paths) == 1:
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
        name = str(file.parent.relative_to(folder.path))
        evaluation = _noting(run, lambda file=file, name=name: read_evaluation(file.parent, name))
        if evaluation is not None:
            run.evaluations.append(evaluation)
    if not folder.checkpoint.is_file():
        run.notes.append("There is no checkpoint: its features cannot be looked at.")
    return run


def read_evaluation(folder, name):
    """The `Evaluation` in a folder.

    Raises:
        UsageError: its result.json is damaged.
    """
    content = _read_json(folder / "result.json")
    several = content.get("data_sets")
    is_list = isinstance(several, list) and all(isinstance(one, dict) for one in several)
    return Evaluation(name, folder, several if is_list else [content])


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
        rows = read_metrics(path)
        if rows and "step" not in rows[0]:
            raise ValueError("it has no column step")
        return rows
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
