"""Pictures: sample images with their neighbours, and what SAIB makes of views."""

import io

from iecl_fast.report.charts import series_style, swatch
from iecl_fast.report.html import data_address, element
from iecl_fast.report.samples import nearest, picture

SIDE = 96  # pixels of an image on the page, at most
SMALL = 64  # an image up to here is kept without loss and enlarged without blur


def neighbour_cards(looks):
    """For each query image what lies nearest to it, a strip for each run.

    Args:
        looks: list of (series, name, `Look`) on the same images.

    Returns:
        list of `Markup`.
    """
    found = [(series, name, seen, nearest(seen)) for series, name, seen in looks]
    first, queries = found[0][2], found[0][3].queries
    return [_card(number, int(place), first, found) for number, place in enumerate(queries)]


def _card(number, place, first, found):
    image, label = picture(first.tests, place)
    name = first.classes[label]
    query = element("figure", _image(image, f"query: {name}"), element("figcaption", name), class_="query")
    strips = []
    for series, run, seen, neighbours in found:
        cells = [
            _neighbour(seen, int(neighbour), float(similarity), label)
            for neighbour, similarity in zip(neighbours.places[number], neighbours.similarities[number])
        ]
        right = int((seen.gallery_labels[neighbours.places[number]] == label).sum())
        head = element(
            "div", swatch(series), element("span", run, class_="name"), f" {right} of {len(cells)}", class_="run"
        )
        cells = element("div", cells, class_="cells", tabindex="0", role="group", aria_label=f"neighbours by {run}")
        strips.append(element("div", head, cells, class_="strip", style=series_style(series)))
    return element("article", query, element("div", strips, class_="strips"), class_="card")


def _neighbour(seen, place, similarity, wanted):
    image, label = picture(seen.gallery, place)
    right = label == wanted
    name, mark = seen.classes[label], "\N{CHECK MARK}" if right else "\N{MULTIPLICATION X}"
    words = f"{name}, {'right' if right else 'wrong'}, similarity {similarity:.2f}"
    caption = element(
        "figcaption",
        element("span", mark, class_="mark", aria_hidden="true"),
        element("span", name, class_="class"),
        element("span", f"{similarity:.2f}", class_="similarity"),
    )
    return element("figure", _image(image, words), caption, class_="right" if right else "wrong", title=words)


def _image(image, alt):
    """A small copy of a PIL image as an element."""
    small = max(image.size) <= SMALL
    if not small:
        image = image.copy()
        image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    kind = "png" if small else "jpeg"
    image.save(file, kind, **({"optimize": True} if small else {"quality": 85}))
    address = data_address(file.getvalue(), kind)
    return element("img", src=address, alt=alt, class_="pixels" if small else None, loading="lazy")


def views_picture(name, path):
    """The run's views.png."""
    alt = f"{name}: some query views, the same after SAIB, and the difference"
    return element(
        "figure", element("figcaption", name), element("img", src=data_address(path.read_bytes(), "png"), alt=alt)
    )
