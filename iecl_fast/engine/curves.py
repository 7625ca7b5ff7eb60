"""curves.png: what metrics.csv holds, as a picture."""

import itertools
import math

import numpy as np

from iecl_fast.engine.figures import drawable, png_figure
from iecl_fast.engine.logging import COUNTS, read_metrics

COLUMNS = 3
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:gray")
ENTROPIES = {"without SAIB": "entropy_anchor", "with SAIB": "entropy_query"}
SMOOTHED_FRACTION = 0.05  # of the run, averaged into one point of the bold line


def draw_curves(metrics_path, picture_path, title=""):
    """Draw the columns of a metrics.csv over the steps: the raw values and their running mean.

    Each column has a panel of its own, but for the entropies without and with SAIB, which share one.

    Args:
        metrics_path: the CSV file; without rows there is no picture.
        picture_path: the PNG file.
        title: above the panels.
    """
    curves = mean_columns([read_metrics(metrics_path)])
    together = {label: name for label, name in ENTROPIES.items() if name in curves}
    panels = {name.replace("_", " "): {"": curves[name]} for name in curves if name not in together.values()}
    if together:
        panels["entropy of the embeddings"] = {label: curves[name] for label, name in together.items()}
    _draw(panels, picture_path, title)


def draw_comparison(metrics_paths, picture_path, title=""):
    """Draw the columns of several runs' metrics.csv, a panel for each column, a curve for each group of runs.

    Args:
        metrics_paths: dict from a label to the CSV files of runs that differ in their seed; their mean is drawn.
        picture_path: the PNG file; without rows there is no picture.
        title: above the panels.
    """
    groups = {label: mean_columns(map(read_metrics, paths)) for label, paths in metrics_paths.items()}
    names = dict.fromkeys(name for curves in groups.values() for name in curves)
    panels = {
        name.replace("_", " "): {label: curves[name] for label, curves in groups.items() if name in curves}
        for name in names
    }
    _draw(panels, picture_path, title)


def mean_columns(runs):
    """The columns of runs that differ in their seed, as curves.

    Args:
        runs: lists of rows, as `read_metrics` gives them.

    Returns:
        dict from column, the loss first, to (steps, mean of the values over the runs), as far as all runs go.
    """
    runs = [rows for rows in runs if rows]
    if not runs:
        return {}
    runs = [rows[: min(map(len, runs))] for rows in runs]
    steps = np.array([row["step"] for row in runs[0]])
    names = [name for name in runs[0][0] if name not in ("step", "epoch") and all(name in rows[0] for rows in runs)]
    names = [name for name in names if name not in COUNTS or any(row[name] for rows in runs for row in rows)]
    names.sort(key=lambda name: name != "loss")
    return {name: (steps, np.mean([[row[name] for row in rows] for rows in runs], axis=0)) for name in names}


def _draw(panels, picture_path, title):
    """Draw panels: a dict from title to a dict from label to (steps, values)."""
    if not panels:
        return
    columns = min(COLUMNS, len(panels))
    lines = math.ceil(len(panels) / columns)
    with png_figure(picture_path, size=(4.5 * columns, 3.0 * lines), dpi=120) as figure:
        figure.suptitle(title)
        for number, (words, curves) in enumerate(panels.items()):
            axes = figure.add_subplot(lines, columns, number + 1)
            for color, (label, (steps, values)) in zip(itertools.cycle(COLORS), curves.items(), strict=False):
                _draw_curve(axes, steps, values, color, drawable(label))
            if any(curves):
                axes.legend(fontsize=8)
            axes.set_title(words, fontsize=10)
            axes.set_xlabel("step", fontsize=9)
            axes.grid(alpha=0.3)


def _draw_curve(axes, steps, values, color, label):
    """One curve: thin as it is, and thick its running mean."""
    middles, means = running_mean(steps, values)
    if len(means) < len(values):
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
    axes.plot(middles, means, color=color, linewidth=1.8 if len(means) < len(values) else 1, label=label)


def running_mean(steps, values):
    """A smoothed curve: (the middle step of each window, the mean of the values in it)."""
    window = max(1, round(SMOOTHED_FRACTION * len(values)))
    means = np.convolve(values, np.full(window, 1 / window), mode="valid")
    first = (window - 1) // 2
    return steps[first : first + len(means)], means
