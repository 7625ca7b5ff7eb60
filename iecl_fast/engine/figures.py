"""Pictures by matplotlib: in a file whole or not at all, with texts as they are."""

import warnings
from contextlib import contextmanager

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from iecl_fast.engine.checkpoint import whole_file

LONGEST = 40  # characters of a name that a picture has room for


@contextmanager
def png_figure(path, *, size, dpi):
    """Context with an empty figure, which is written as a PNG file at its end.

    Names of classes and folders may hold anything: a dollar begins no formula in it, and what the font lacks is a box.

    Args:
        path: the file.
        size: width and height in inches.
        dpi: pixels of an inch.
    """
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        with whole_file(path) as file:
            figure.savefig(file, format="png", dpi=dpi)


def drawable(name):
    """A name as a picture can show it: cut where it is long, and without the bytes of a file name that are no text."""
    text = str(name).encode(errors="replace").decode()
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
