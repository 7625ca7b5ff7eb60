"""What an evaluation says about single classes: their accuracies, and which are taken for which."""

import io
from numbers import Real

import numpy as np
from PIL import Image

from iecl_fast.evaluate.accuracy import percent
from iecl_fast.report.charts import series_style
from iecl_fast.report.html import data_address, element
from iecl_fast.report.tables import folded, named_values, plain, scrolling

WRITTEN_OUT = 20  # classes whose confusions are numbers in a table; those of more are a picture
WORST = 40  # classes that are listed with their accuracy, from the worst on
PAIRS = 8  # most frequent confusions that are listed
LONG = 200  # characters of a value that the plain table has no room for


def run_results(about, run, names):
    """What a run's own result.json says about single classes.

    Args:
        about: the run, in words.
        run: `Run`.
        names: of the data's classes, None where they are not known.

    Returns:
        list of `Markup`.
    """
    return _drawn(about, run.result or {}, names)[0]


def evaluation_blocks(about, found, names):
    """A later evaluation: its figures, what it says about single classes, the pictures it has left.

    Args:
        about: the run, in words; empty where there is none.
        found: `Evaluation`.
        names: of the classes of the run's data, None where they are not known.

    Returns:
        list of `Markup`.
    """
    blocks = []
    for result in found.results:
        data = plain(result.get("data", "")) if len(found.results) > 1 else ""
        words = ", ".join(filter(None, (about, found.name, data)))
        drawn, left = _drawn(words, result, names)
        blocks.append(folded(words, named_values(left), opened=True))
        blocks += drawn
    for path in sorted(found.folder.glob("*.png")):
        if not path.name.startswith("confusion"):  # that is drawn from its numbers
            words = ", ".join(filter(None, (about, found.name, path.stem)))
            picture = element("img", src=data_address(path.read_bytes(), "png"), alt=words, class_="picture")
            blocks.append(folded(words, picture, opened=True))
    return blocks


def _drawn(about, result, names):
    """Pictures of the values that are about classes, and a dict of the others, without those that are too long."""
    blocks, left = [], {}
    for key, value in result.items():
        block = _of_classes(f"{key.replace('_', ' ')}: {about}", key, value, result.get("classes", names))
        if block is not None:
            blocks.append(block)
        elif key != "classes" and len(plain(value)) <= LONG:
            left[key] = percent(value) if "_top" in key and isinstance(value, Real) else value
    return blocks, left


def _of_classes(title, key, value, names):
    """A picture of a value that is about classes; None for any other."""
    if key.endswith(("_class_top1", "_per_class")):
        if isinstance(value, list):
            value = dict(zip(_names(names, len(value)), value, strict=True))
        if isinstance(value, dict):
            known = {name: share for name, share in value.items() if share is not None}  # None: without test images
            if _numbers(list(known.values())):
                return folded(title, _accuracies(list(known.values()), list(known)), opened=True)
    if key.endswith("_confusion") and _square(value):
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
            element("td", f"{number:g}", style=f"--share:{share:.1%}")
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
