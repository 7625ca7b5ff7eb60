"""curves.png: what metrics.csv holds, as a picture."""

import math

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from iecl_fast.engine.checkpoint import whole_file
from iecl_fast.engine.logging import read_metrics

COLUMNS = 3
SMOOTHED_FRACTION = 0.05  # of the run, averaged into one point of the bold line


def draw_curves(metrics_path, picture_path, title=""):
    """Draw one panel for each column of a metrics.csv over the steps: the raw values and their running mean.

    Args:
        metrics_path: the CSV file; without rows there is no picture.
        picture_path: the PNG file.
        title: above the panels.
    """
    rows = read_metrics(metrics_path)
    if not rows:
        return
    names = [name for name in rows[0] if name not in ("step", "epoch")]
    names.sort(key=lambda name: name != "loss")  # the loss first
    steps = np.array([row["step"] for row in rows])
    lines = math.ceil(len(names) / COLUMNS)
    figure = Figure(figsize=(4.5 * min(COLUMNS, len(names)), 3.0 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for number, name in enumerate(names):
        axes = figure.add_subplot(lines, min(COLUMNS, len(names)), number + 1)
        _draw_panel(axes, steps, np.array([row[name] for row in rows]), name)
    with whole_file(picture_path) as file:
        figure.savefig(file, format="png", dpi=120)


def _draw_panel(axes, steps, values, name):
    window = max(1, round(SMOOTHED_FRACTION * len(values)))
    axes.plot(steps, values, color="tab:blue", alpha=0.3 if window > 1 else 1.0, linewidth=1)
    if window > 1:
        means = np.convolve(values, np.full(window, 1 / window), mode="valid")
        first = (window - 1) // 2  # the middle of each window
        axes.plot(steps[first : first + len(means)], means, color="tab:blue", linewidth=1.8)
    axes.set_title(name.replace("_", " "), fontsize=10)
    axes.set_xlabel("step", fontsize=9)
    axes.grid(alpha=0.3)
