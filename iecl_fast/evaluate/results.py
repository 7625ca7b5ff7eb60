"""What an evaluation leaves: result.json, a picture of each confusion matrix, and a table of several data sets."""

import os
from pathlib import Path

import numpy as np

from iecl_fast.engine.checkpoint import whole_file
from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.figures import drawable, png_figure
from iecl_fast.engine.folder import check_writable, write_json
from iecl_fast.evaluate.accuracy import percent

TABLE = "table.md"
NAMED_CLASSES = 60  # more names than these cannot be read beside a picture
NUMBERED_CLASSES = 20  # nor more numbers than these in it


def check_output(folder):
    """The folder for an evaluation, as a `Path`. Nothing is made yet.

    Raises:
        UsageError: there is a result in it already, it is a run's, or it cannot be made.
    """
    folder = Path(folder)
    for old in (folder / "result.json", folder / TABLE, *folder.glob("confusion*.png")):
        if os.path.lexists(old):
            raise UsageError(f"{old} exists already and is not overwritten: name another folder with --output")
    if (folder / "config.yaml").exists():  # the result would count as the run's own
        raise UsageError(f"--output: {folder} is not allowed, it is a run's folder: name one inside it, or another")
    check_writable(folder)
    return folder


def write_results(folder, evaluations):
    """Write result.json, a PNG file for each data set and, for several, table.md.

    Args:
        folder: `Path`, made if it is not there.
        evaluations: list of `Evaluation`. The result of several is ``{"data_sets": [the result of each]}``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = short_names(evaluations)
    for name, evaluation in zip(names, evaluations, strict=True):
        suffix = f"-{name}" if len(evaluations) > 1 else ""
        draw_confusion(evaluation, folder / f"confusion{suffix}.png", name)
    results = [evaluation.result() for evaluation in evaluations]
    if len(results) > 1:
        with whole_file(folder / TABLE) as file:
            file.write((format_table(evaluations) + "\n").encode(errors="backslashreplace"))
    write_json(folder / "result.json", results[0] if len(results) == 1 else {"data_sets": results})


def short_names(evaluations):
    """A name for each data set: the last part of a folder, with a number where that was there before."""
    names = []
    for evaluation in evaluations:
        name = Path(evaluation.data).name
        same = sum(name == Path(other.data).name for other in evaluations[: len(names)])
        names.append(f"{name}-{same + 1}" if same else name)
    return names


def format_table(evaluations):
    """A Markdown table: a row for each data set."""
    rows = [("data", "train images", "test images", "classes", "top-1", "top-5", "mean of the classes")]
    for name, evaluation in zip(short_names(evaluations), evaluations, strict=True):
        summary, protocol = evaluation.summary, evaluation.protocol
        counts = (summary["train_images"], summary["test_images"], len(evaluation.classes))
        tops = (summary[f"{protocol}_top1"], summary[f"{protocol}_top5"], evaluation.class_mean())
        cell = " ".join(name.split()).replace("|", "\\|")
        rows.append((cell, *map(str, counts), *map(percent, tops)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append(f"| {' | '.join(cells)} |")
    rule = [f":{'-' * (widths[0] - 1)}", *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    lines.insert(1, f"| {' | '.join(rule)} |")
    return "\n".join(lines)


def draw_confusion(evaluation, path, name):
    """Write a confusion matrix as a PNG file: the parts of each true class, a row, that are taken for which.

    Args:
        evaluation: `Evaluation`.
        path: the PNG file.
        name: of the data set, for the title.
    """
    counts = evaluation.confusion.numpy()
    parts = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    classes = len(counts)
    size = max(4.5, 3 + min(0.35 * classes, 14))
    with png_figure(path, size=(size + 1, size), dpi=110) as figure:
        axes = figure.add_subplot()
        image = axes.imshow(parts, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        figure.colorbar(image, label="part of the class", shrink=0.8)
        top1 = evaluation.summary[f"{evaluation.protocol}_top1"]
        axes.set_title(f"{evaluation.protocol} on {drawable(name)}: {percent(top1)} of {counts.sum()} images")
        axes.set_xlabel("taken for")
        axes.set_ylabel("class")
        if classes <= NAMED_CLASSES:
            names = list(map(drawable, evaluation.classes))
            axes.set_xticks(range(classes), names, rotation=90, fontsize=8)
            axes.set_yticks(range(classes), names, fontsize=8)
        if classes <= NUMBERED_CLASSES:
            for row, column in np.argwhere(counts):
                color = "white" if parts[row, column] > 0.5 else "black"
                axes.text(column, row, counts[row, column], ha="center", va="center", color=color, fontsize=7)
