"""accuracy.png: what a sweep has reached, against the values of the key that it varies."""

import itertools
import math
import statistics

from iecl_fast.engine.curves import COLORS
from iecl_fast.engine.figures import drawable, png_figure

PANELS = {"knn_top1": "kNN", "linear_top1": "linear probe"}


def draw_accuracies(lines, picture_path, *, key, values):
    """Draw the test accuracy in per cent: a line for each configuration, its deviation over the seeds as error bars.

    Dotted is the accuracy of the untrained encoder. The deviation is that of a sample; one seed has none.

    Args:
        lines: dict from label to a dict from value to the figures of its runs: a dict with the lists ``knn_top1``,
            ``linear_top1`` and both ``_untrained``. Values without runs are left out of a line.
        picture_path: the PNG file.
        key, values: of the axis, in its order.
    """
    with png_figure(picture_path, size=(4.6 * len(PANELS), 3.8), dpi=120) as figure:
        for number, (name, words) in enumerate(PANELS.items(), start=1):
            axes = figure.add_subplot(1, len(PANELS), number)
            for color, (label, figures) in zip(itertools.cycle(COLORS), lines.items(), strict=False):
                _draw_line(axes, [figures.get(value, {}).get(name, []) for value in values], color, label)
                untrained = [accuracy for found in figures.values() for accuracy in found[f"{name}_untrained"]]
                axes.axhline(100 * statistics.mean(untrained), color=color, linestyle=":", linewidth=1)
            axes.set_title(words, fontsize=10)
            axes.set_xticks(range(len(values)), list(map(drawable, values)))
            axes.set_xlim(-0.3, len(values) - 0.7)
            axes.set_xlabel(key, fontsize=9)
            axes.set_ylabel("test accuracy, %" if number == 1 else "", fontsize=9)
            axes.grid(alpha=0.3)
        axes.plot([], [], color="black", linestyle=":", linewidth=1, label="untrained")
        axes.legend(fontsize=8)


def _draw_line(axes, accuracies, color, label):
    """One line; `accuracies` are a list of runs' for each place on the axis."""
    places = [place for place, found in enumerate(accuracies) if found]
    percent = [[100 * accuracy for accuracy in accuracies[place]] for place in places]
    deviations = [statistics.stdev(found) if len(found) > 1 else math.nan for found in percent]  # NaN draws no bar
    means = [statistics.mean(found) for found in percent]
    bars = {"yerr": deviations, "capsize": 3}
    axes.errorbar(places, means, color=color, label=drawable(label), marker="o", markersize=4, **bars)
