"""Elements of HTML, escaped by construction: a text becomes markup only through `element`."""

import base64
import html

EMPTY_ELEMENTS = ("img", "line", "path", "polyline", "wbr")  # they have no children and no end tag


class Markup(str):
    """Text that is HTML already."""


def element(name, *children, **attributes):
    """``<name attribute="...">children</name>``.

    Args:
        name: of the element.
        children: `Markup` as it is, lists of children one after the other, anything else as escaped text; None is left
            out.
        attributes: escaped; ``class_`` and ``for_`` stand for class and for, ``data_x`` for data-x. None is left out,
            True is an attribute without a value.

    Returns:
        `Markup`.
    """
    words = [name]
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(key)
        elif value is not None:
            words.append(f'{key}="{html.escape(str(value))}"')
    start = " ".join(words)
    return Markup(f"<{start}/>" if name in EMPTY_ELEMENTS else f"<{start}>{join(children)}</{name}>")


def join(children):
    """Children of an element, as `element` takes them, one after the other."""
    parts = []
    for child in children:
        if isinstance(child, (list, tuple)):
            parts.append(join(child))
        elif child is not None:
            parts.append(child if isinstance(child, Markup) else html.escape(str(child)))
    return Markup("".join(parts))


def data_address(content, kind):
    """The address of an image that is part of the page.

    Args:
        content: bytes of the file.
        kind: "png" or "jpeg".
    """
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
