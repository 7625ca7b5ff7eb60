"""What an evaluation says about single classes: their accuracies, and which are taken for which."""

import io
from numbers import Real

import numpy as np
from PIL import Image

from iecl_fast.commands.words import percent
from iecl_fast.report.charts import series_style
from iecl_fast.report.html import data_address, element
from iecl_fast.report.tables import folded, named_values, plain, scrolling

WRITTEN_OUT = 20  # classes whose confusions are numbers in a table; those of more are a picture
WORST = 40  # classes that are listed with their accuracy, from the worst on
PAIRS = 8  # most frequent confusions that are listed
LONG = 200  # characters of a value that the plain table has no room for


def evaluations(group, names):
    """Everything that evaluations of a group's runs hold beside the accuracies of the first table.

    Args:
        group: `Group`.
        names: of the data's classes, None where they are not known.

    Returns:
        list of `Markup`.
    """
    blocks = []
    for run in group.runs:
        seed = f"seed {plain(run.seed)}" if len(group.runs) > 1 else ""
        for place, result in {"": run.result or {}, **run.evaluations}.items():
            about = ", ".join(filter(None, (group.name, seed, place)))
            classes = result.get("classes", names)
            drawn = {key: _of_classes(f"{key.replace('_', ' ')}: {about}", key, result[key], classes) for key in result}
            plainly = {
                key: result[key] for key, block in drawn.items() if block is None and len(plain(result[key])) <= LONG
            }
            if place:
                blocks.append(folded(about, named_values(plainly), opened=True))
            blocks += [block for block in drawn.values() if block is not None]
    return blocks


def _of_classes(title, key, value, names):
    """A picture of a value that is about classes; None for any other."""
    if "per_class" in key:
        if isinstance(value, dict):
            names, value = list(value), list(value.values())
        if _numbers(value):
            return folded(title, _accuracies(value, _names(names, len(value))), opened=True)
    if "confusion" in key and _square(value):
        return folded(title, _confusions(np.array(value, dtype=float), _names(names, len(value))), opened=True)
    return None


def _square(rows):
    return isinstance(rows, list) and bool(rows) and all(_numbers(row) and len(row) == len(rows) for row in rows)


def _numbers(values):
    return isinstance(values, list) and bool(values) and all(isinstance(value, Real) for value in values)


def _names(names, count):
    fitting = isinstance(names, list) and len(names) == count
    return [str(name) for name in names] if fitting else [str(number) for number in range(count)]


def _accuracies(values, names):
    order = sorted(range(len(values)), key=lambda place: (values[place], place))[:WORST]
    rows = []
    for place in order:
        share = min(max(values[place], 0.0), 1.0)
        track = element("span", element("span", class_="bar", style=f"width:{share:.2%}"), class_="track")
        value = element("span", percent(values[place]), class_="value")
        rows.append(element("div", element("span", names[place], class_="name"), track, value, class_="row"))
    left_out = len(values) - len(order)
    note = f"From the worst on; {left_out} better ones are left out." if left_out else "From the worst on."
    return element("figure", element("figcaption", note), rows, class_="dots shares", style=series_style(0))


def _confusions(counts, names):
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-12)
    parts = [element("p", "Rows: the class. Columns: what it was taken for.", class_="note")]
    parts.append(_table(counts, shares, names) if len(names) <= WRITTEN_OUT else _picture(shares))
    wrong = shares * (1 - np.eye(len(names)))
    places = np.argsort(-wrong, axis=None, kind="stable")[:PAIRS]
    pairs = [
        (row, column) for row, column in (divmod(int(place), len(names)) for place in places) if wrong[row, column]
    ]
    if pairs:
        words = [f"{names[row]} as {names[column]}, {percent(wrong[row, column])}" for row, column in pairs]
        parts.append(element("p", "Most often wrong: ", "; ".join(words), "."))
    return parts


def _table(counts, shares, names):
    head = element("thead", element("tr", element("td"), [element("th", name, scope="col") for name in names]))
    rows = []
    for name, numbers, parts in zip(names, counts, shares, strict=True):
        cells = [
            element("td", f"{number:g}", style=f"--share:{share:.1%}", class_="strong" if share > 0.5 else None)
            for number, share in zip(numbers, parts, strict=True)
        ]
        rows.append(element("tr", element("th", name, scope="row"), cells))
    return scrolling(element("table", head, element("tbody", rows), class_="confusion"), "confusions")


def _picture(shares):
    """The shares as the opacity of one colour, which lies well on a light and on a dark page."""
    pixels = np.full((*shares.shape, 4), (46, 134, 222, 0), dtype=np.uint8)
    pixels[..., 3] = np.round(255 * np.sqrt(shares))
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    words = f"confusions of {len(shares)} classes; a row is a class, a column what it was taken for"
    return element("img", src=data_address(file.getvalue(), "png"), alt=words, class_="heat")
