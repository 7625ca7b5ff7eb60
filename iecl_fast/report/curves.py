"""Curves of the metrics as SVG: one panel for each column, all runs in it. page.js lets one look closer."""

import math

import numpy as np

from iecl_fast.engine.curves import mean_columns, running_mean
from iecl_fast.report.charts import SERIES, series_style
from iecl_fast.report.html import element

WIDTH, HEIGHT = 360, 220  # of a panel, in the units of its viewBox
LEFT, TOP, RIGHT, BOTTOM = 54, 8, 8, 26  # margins for the ticks
UNIT = 1000  # side of the plot area in its own units, whatever its shape
POINTS = 400  # of a curve, at most: neighbouring rows are averaged
LARGEST = 1e300  # of a number that is drawn: differences of larger ones are none any more
MIDDLE = (1, 99)  # percentiles of the single values that a panel shows for sure; the means it shows all


def curve_panels(groups):
    """A panel for each column of the runs' metrics: thin each run, bold the running mean over the runs of a group.

    Args:
        groups: list of `Group`.

    Returns:
        list of `Markup`, empty where no run has logged anything.
    """
    panels = {}
    for number, group in enumerate(groups):
        means = mean_columns([run.metrics for run in group.runs])
        singles = [mean_columns([run.metrics]) for run in group.runs]
        for name in means:
            thin = [_finite(*columns[name]) for columns in singles if name in columns]
            bold = _finite(*means[name])
            if len(bold[0]):
                panels.setdefault(name, []).append((number, group.name, thin, running_mean(*bold)))
    steps = np.array([row["step"] for group in groups for run in group.runs for row in run.metrics])
    return [_panel(name, curves, _limits(steps, 0)) for name, curves in panels.items()]


def _finite(steps, values):
    kept = np.abs(values) < LARGEST  # False for NaN
    return steps[kept], values[kept]


def _panel(name, curves, x_range):
    """One panel; `curves` is a list of (series, name, thin curves, bold curve)."""
    singles = [np.percentile(values, MIDDLE) for _, _, thin, _ in curves for _, values in thin]
    y_range = _limits(np.concatenate(singles + [values for *_, (_, values) in curves]), 0.05)
    lines = []
    for series, label, thin, bold in curves:
        drawn = [
            _line("thin", curve, x_range, y_range) for curve in thin if len(curve[0]) > len(bold[0]) or len(thin) > 1
        ]
        drawn.append(_line("bold", bold, x_range, y_range))
        kind = "series" if series < SERIES else "series dashed"
        lines.append(element("g", drawn, class_=kind, style=series_style(series), data_series=series, data_name=label))
    words = name.replace("_", " ")
    ends = "; ".join(f"{label} from {values[0]:.4g} to {values[-1]:.4g}" for _, label, _, (_, values) in curves)
    plot = element(
        "svg",
        lines,
        class_="plot",
        x=LEFT,
        y=TOP,
        width=WIDTH - LEFT - RIGHT,
        height=HEIGHT - TOP - BOTTOM,
        viewBox=f"0 0 {UNIT} {UNIT}",
        preserveAspectRatio="none",
    )
    drawing = element(
        "svg",
        element("g", _ticks(x_range, y_range), class_="ticks"),
        plot,
        class_="curve",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{words} over the steps: {ends}",
        data_x=f"{x_range[0]} {x_range[1]}",
        data_y=f"{y_range[0]} {y_range[1]}",
    )
    return element("figure", element("figcaption", words), drawing, class_="panel")


def _limits(values, margin):
    """Lowest and highest value with a margin, as a part of their distance; never the same number twice."""
    low, high = float(values.min()), float(values.max())
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin, low, high = 0, low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
    return low - margin * (high - low), high + margin * (high - low)


def _line(kind, curve, x_range, y_range):
    steps, values = (_averaged(numbers) for numbers in curve)
    x = UNIT * (steps - x_range[0]) / (x_range[1] - x_range[0])
    y = UNIT * (y_range[1] - values) / (y_range[1] - y_range[0])
    points = " ".join(f"{a:.4g},{b:.4g}" for a, b in zip(x, np.clip(y, -9 * UNIT, 9 * UNIT)))
    return element("polyline", class_=kind, points=points)


def _averaged(numbers):
    parts = np.array_split(numbers, min(POINTS, len(numbers)))
    return np.array([part.mean() for part in parts])


def _ticks(x_range, y_range):
    marks = []
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for value, words in ticks(*y_range, 5):
        y = f"{TOP + (y_range[1] - value) / (y_range[1] - y_range[0]) * (bottom - TOP):.1f}"
        marks.append(element("line", x1=LEFT, x2=right, y1=y, y2=y))
        marks.append(element("text", words, x=LEFT - 6, y=y, dy="0.32em", text_anchor="end"))
    for value, words in ticks(*x_range, 6):
        x = f"{LEFT + (value - x_range[0]) / (x_range[1] - x_range[0]) * (right - LEFT):.1f}"
        marks.append(element("text", words, x=x, y=HEIGHT - 9, text_anchor="middle"))
    return marks


def ticks(low, high, most):
    """At most `most` round numbers between low and high, 1, 2 or 5 times a power of ten apart: (number, its words)."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    numbers = [place * step for place in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [(number, f"{number:.6g}") for number in numbers]
