"""Small charts: accuracies before and after as dots on a line, features in the plane."""

import statistics

from iecl_fast.evaluate.accuracy import percent
from iecl_fast.report.html import element

SERIES = 8  # colours of page.css
PROTOCOLS = {"knn": "kNN", "linear": "Linear probe"}
SIDE = 500  # of the picture of features, in the units of its viewBox

# A glyph for each class beside its colour, so that colour alone tells nothing: path data around (0, 0).
GLYPHS = (
    "m-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0-6.8 0z",  # disc
    "m-3 -3h6v6h-6z",  # square
    "m0 -4.1l3.9 7h-7.8z",  # triangle
    "m0 -4.4l4.4 4.4l-4.4 4.4l-4.4-4.4z",  # diamond
    "m-1.2 -4.2h2.4v3h3v2.4h-3v3h-2.4v-3h-3v-2.4h3z",  # cross
)


def series_style(number):
    """The inline style that gives a run or a class its colour; the ninth has the first one's."""
    return f"--c:var(--series-{number % SERIES})"


def swatch(number):
    """A spot of colour beside a run's name."""
    return element("span", class_="swatch", style=series_style(number), aria_hidden="true")


def before_and_after(groups):
    """For each protocol and data set a line for each group: top-1 accuracy untrained and trained.

    Returns:
        list of `Markup`; empty where no run is finished.
    """
    charts = []
    data_sets = dict.fromkeys(group.data for group in groups)
    for data in data_sets:
        for protocol, words in PROTOCOLS.items():
            lines = [
                (number, group.name, group.figures(f"{protocol}_top1_untrained"), group.figures(f"{protocol}_top1"))
                for number, group in enumerate(groups)
                if group.data == data and group.figures(f"{protocol}_top1")
            ]
            if lines:
                of_data = f", {data}" if len(data_sets) > 1 else ""
                charts.append(_dots(f"{words}, top-1{of_data}", lines))
    return charts


def _dots(title, lines):
    """One chart; `lines` is a list of (series, name, accuracies before, accuracies after)."""
    values = [value for *_, before, after in lines for value in before + after]
    room = max(0.02, 0.08 * (max(values) - min(values)))
    low, high = max(0.0, min(values) - room), min(1.0, max(values) + room)
    rows = [_row(*line, lambda value: (value - low) / (high - low)) for line in lines]
    ends = element("div", element("span", percent(low)), element("span", percent(high)), class_="ends")
    return element("figure", element("figcaption", title), rows, ends, class_="dots")


def _row(number, name, before, after, place):
    marks = []
    if before:
        start, end = sorted(place(statistics.mean(side)) for side in (before, after))
        marks.append(element("span", class_="bar", style=f"left:{start:.2%};width:{end - start:.2%}"))
        marks.append(element("span", class_="dot untrained", style=f"left:{place(statistics.mean(before)):.2%}"))
    if len(after) > 1:
        marks += [element("span", class_="dot seed", style=f"left:{place(value):.2%}") for value in after]
    marks.append(element("span", class_="dot", style=f"left:{place(statistics.mean(after)):.2%}"))
    words = percent(statistics.mean(after))
    told = f"{words}, untrained {percent(statistics.mean(before))}" if before else words
    return element(
        "div",
        element("span", swatch(number), name, class_="name"),
        element("span", marks, class_="track", role="img", aria_label=told, title=told),
        element("span", words, class_="value"),
        class_="row",
        style=series_style(number),
    )


def scatter(points, labels, classes, caption):
    """Points in the plane, coloured by their class, with a legend whose entries bring out one class.

    Args:
        points: (n, 2) array in 0..1.
        labels: (n,) int array.
        classes: names of all classes.
        caption: what the picture shows.
    """
    margin = 10
    low, high = points[:, 1].min(), points[:, 1].max()
    height = margin + (high - low) * (SIDE - 2 * margin) + margin
    places = margin + (points - [0, low]) * (SIDE - 2 * margin)
    shown = sorted(set(labels.tolist()))
    paths, entries = [], []
    for number, label in enumerate(shown):
        glyph = GLYPHS[number % len(GLYPHS)]
        drawing = "".join(f"M{x:.1f} {y:.1f}{glyph}" for x, y in places[labels == label])
        name = classes[label]
        style = series_style(number)
        path = element("path", d=drawing)
        paths.append(element("g", element("title", name), path, class_="class", style=style, data_class=number))
        sample = element("svg", element("path", d=f"M6 6{glyph}"), viewBox="0 0 12 12", aria_hidden="true")
        entries.append(
            element("button", sample, name, type="button", style=style, data_class=number, aria_pressed="false")
        )
    words = f"{caption}. {len(labels)} test images of the classes {', '.join(classes[label] for label in shown)}"
    drawing = element("svg", paths, viewBox=f"0 0 {SIDE} {height:.0f}", role="img", aria_label=words)
    legend = element("div", entries, class_="legend classes")
    return element("figure", element("figcaption", caption), drawing, legend, class_="scatter")
