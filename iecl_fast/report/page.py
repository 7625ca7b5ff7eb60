"""The page: everything that the runs give, in a template that needs nothing beside itself."""

import base64
import hashlib
import string
import sys
from datetime import datetime
from importlib import resources

from iecl_fast import __version__
from iecl_fast.engine.errors import RunError, UsageError
from iecl_fast.report.charts import before_and_after, scatter, series_style, swatch
from iecl_fast.report.classes import evaluation_blocks, run_results
from iecl_fast.report.curves import curve_panels
from iecl_fast.report.html import element, join
from iecl_fast.report.pictures import neighbour_cards, views_picture
from iecl_fast.report.projection import project
from iecl_fast.report.runs import gather
from iecl_fast.report.samples import look
from iecl_fast.report.tables import accuracy_table, background, plain


def report(paths):
    """One HTML page over runs.

    Args:
        paths: run folders, folders of sweeps and of evaluations.

    Returns:
        str, the whole file.

    Raises:
        UsageError: a folder is not there or holds no run; a configuration is damaged.
    """
    groups, loose = gather(paths)
    looks = [_look(group) for group in groups]
    found = [
        (number, group, seen)
        for number, (group, seen) in enumerate(zip(groups, looks, strict=True))
        if seen is not None
    ]
    sections = [
        ("accuracies", "Accuracies", _accuracies(groups) if groups else []),
        ("curves", "Curves", _curves(groups)),
        ("neighbours", "Neighbours", _neighbours(found)),
        ("features", "Features", _features(found)),
        ("views", "Views", _views(groups)),
        ("evaluations", "Evaluations", _evaluations(groups, looks, loose)),
        ("background", "Environment and configuration", background(groups)),
    ]
    return _fill(groups, loose, [section for section in sections if section[2]])


def _look(group):
    """The features of the group's sample images, or None with a note at its run."""
    run = group.shown_run
    if not run.folder.checkpoint.is_file():
        return None
    print(f"features of {run.folder.path}", file=sys.stderr, flush=True)
    try:
        seen = look(run.folder.path)
    except (UsageError, RunError, OSError) as error:
        run.notes.append(f"Its features cannot be looked at: {error}.")
        return None
    run.notes += [f"An image cannot be read and is left out: {text}." for text in seen.unreadable]
    return seen


def _about(group, run=None):
    """A run's name: its group's, with the seed where there are several; None is the one whose features are shown."""
    run = group.shown_run if run is None else run
    return f"{group.name}, seed {plain(run.seed)}" if len(group.runs) > 1 else group.name


def _accuracies(groups):
    charts = before_and_after(groups)
    notes = []
    if charts:
        text = "Ring: the untrained network. Disc: the trained one."
        if any(len(group.finished) > 1 for group in groups):
            text += " Both are means over the seeds; the small discs are the single seeds."
        notes.append(element("p", text, class_="note"))
    return [element("div", charts, class_="side-by-side"), *notes, accuracy_table(groups)]


def _curves(groups):
    panels = curve_panels(groups)
    if not panels:
        return []
    keys = [
        element("button", swatch(number), group.name, type="button", data_series=number, aria_pressed="true")
        for number, group in enumerate(groups)
    ]
    hint = (
        "Bold: the running mean, over the seeds too. Thin: the single rows. Draw across a panel to look closer, in all "
        "of them at once; a double click shows all steps again. A loss among K' negatives is log(K' + 1) for a guess: "
        "as a ring closes in it may rise while the encoder gets better."
    )
    reset = element("button", "Show all steps", type="button", id="reset", hidden=True)
    legend = element("div", keys, reset, class_="legend runs-legend")
    return [element("p", hint, class_="note"), legend, element("div", panels, class_="panels")]


def _neighbours(found):
    parts = []
    for looks in _by_data(found):
        _, group, seen = looks[0]
        words = (
            f"Test images of {group.data}, each of another class, and the most similar of "
            f"{_part(len(seen.gallery), seen.total_gallery)} training images, by the cosine of their features."
        )
        parts.append(element("p", words, class_="note"))
        parts.append(element("div", neighbour_cards([(n, _about(g), one) for n, g, one in looks]), class_="cards"))
    return parts


def _by_data(found):
    """Those that looked at the same images together."""
    together = {}
    for entry in found:
        _, group, seen = entry
        key = (group.data, tuple(seen.tests.indices.tolist()), tuple(seen.gallery.indices.tolist()))
        together.setdefault(key, []).append(entry)
    return together.values()


def _part(some, total):
    return f"all {total:,}" if some == total else f"{some:,} of {total:,}"


def _features(found):
    figures, notes = [], []
    for number, group, seen in found:
        try:
            points, how = project(seen.test_features.numpy())
        except RunError as error:
            notes.append(element("p", swatch(number), f"{_about(group)}: {error}.", class_="note"))
            continue
        caption = f"{_about(group)}: {how}, {_part(len(points), seen.total_tests)} test images, step {seen.step}"
        figures.append(scatter(points, seen.test_labels.numpy(), seen.classes, caption))
    return [*notes, element("div", figures, class_="side-by-side")] if figures else notes


def _views(groups):
    shown = [(group, group.shown_run.folder.views) for group in groups if group.shown_run.folder.views.is_file()]
    if not shown:
        return []
    words = (
        "Some query views, the same after SAIB with its scale and shift taken off, and the difference around grey, at "
        "the end of the training."
    )
    figures = [views_picture(_about(group), path) for group, path in shown]
    return [element("p", words, class_="note"), element("div", figures, class_="side-by-side")]


def _evaluations(groups, looks, loose):
    blocks = []
    for group, seen in zip(groups, looks, strict=True):
        names = seen.classes if seen else None
        for run in group.runs:
            about = _about(group, run)
            blocks += run_results(about, run, names)
            for one in run.evaluations:
                blocks += evaluation_blocks(about, one, names)
    for one in loose:
        blocks += evaluation_blocks("", one, None)
    return blocks


def _fill(groups, loose, sections):
    folder = resources.files("iecl_fast").joinpath("report")
    style, script, template = (folder.joinpath(f"page.{kind}").read_text() for kind in ("css", "js", "html"))
    names = [one.name for one in (*groups, *loose)]
    title = ", ".join(names)
    title = f"Report: {title}" if len(title) <= 60 else f"Report: {len(names)} runs"
    links = [element("a", words, href=f"#{key}") for key, words, _ in sections]
    body = [element("section", element("h2", words), content, id=key) for key, words, content in sections]
    return string.Template(template).substitute(
        title=element("title", title),
        heading=element("h1", title),
        # Only this script may run, whatever else should have got into the page.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=style,
        script=script,
        links=join(links),
        made=join([f"iecl_fast {__version__}, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"]),
        runs=join([_introduced(number, group) for number, group in enumerate(groups)]),
        body=join(body),
    )


def _introduced(number, group):
    """The group at the top of the page: where it lies, how far it has come, what is missing."""
    states = [f"seed {plain(run.seed)} {run.state}" if len(group.runs) > 1 else run.state for run in group.runs]
    notes = [
        element("p", f"seed {plain(run.seed)}: {note}" if len(group.runs) > 1 else note, class_="warning")
        for run in group.runs
        for note in run.notes
    ]
    folder = group.runs[0].folder.path if len(group.runs) == 1 else group.runs[0].folder.path.parent
    return element(
        "li",
        element("p", swatch(number), element("strong", group.name), f" {group.method} on {group.data}"),
        element("p", "; ".join(states), " - ", element("code", folder), class_="note"),
        notes,
        style=series_style(number),
    )
