"""Tables: what the runs reached, how they differ, what they ran on, their configurations."""

import json
import statistics

import yaml

from iecl_fast.engine.sweep import spread
from iecl_fast.report.charts import PROTOCOLS, swatch
from iecl_fast.report.html import element
from iecl_fast.report.runs import differing_settings

MINUS = "\N{MINUS SIGN}"


def accuracy_table(groups):
    """The runs side by side: accuracies before and after, what they were measured with, and settings that differ."""
    comparable = len({group.data for group in groups}) == 1 and len(groups) > 1
    bodies = [_accuracies(groups, name, words, comparable) for name, words in _protocols(groups).items()]
    bodies.append(_body("Training", _training_rows(groups)))
    settings = differing_settings(groups)
    if settings:
        rows = [_row(_key(key), map(plain, values)) for key, values in settings.items()]
        bodies.append(_body("Settings that differ", rows))
    heads = [
        element("th", element("span", swatch(number), group.name, class_="name"), _badge(group), scope="col")
        for number, group in enumerate(groups)
    ]
    head = element("thead", element("tr", element("td"), heads))
    return scrolling(element("table", head, bodies, class_="runs"), "accuracies and settings of the runs")


def _key(dotted):
    """A dotted key, which may be broken behind its dots."""
    group, dot, key = dotted.rpartition(".")
    return element("code", group + dot, element("wbr"), key)


def scrolling(table, label):
    """A table that scrolls by itself where it is wider than the page, by keyboard too."""
    return element("div", table, class_="scrolling", tabindex="0", role="region", aria_label=label)


def _badge(group):
    states = [run.state for run in group.runs]
    if len(states) > 1:
        words = f"{len(states)} seeds"
        unfinished = sum(state != "finished" for state in states)
        if unfinished:
            words += f", {unfinished} unfinished"
    else:
        words, unfinished = states[0], states[0] != "finished"
    return element("span", words, class_="badge open" if unfinished else "badge")


def _protocols(groups):
    """Names and words of what result.json has a top-1 accuracy of."""
    found = {key.removesuffix("_top1"): None for group in groups for run in group.finished for key in run.result}
    found = [name for name in found if any(group.figures(f"{name}_top1") for group in groups)]
    ordered = [*(name for name in PROTOCOLS if name in found), *(name for name in found if name not in PROTOCOLS)]
    return {name: PROTOCOLS.get(name, name.replace("_", " ")) for name in ordered}


def _accuracies(groups, name, words, comparable):
    rows = []
    for top in ("top1", "top5"):
        after = [group.figures(f"{name}_{top}") for group in groups]
        before = [group.figures(f"{name}_{top}_untrained") for group in groups]
        if not any(after):
            continue
        label = top.replace("top", "top-")
        means = [statistics.mean(values) if values else -1 for values in after]
        best = max(means) if comparable and min(means) != max(means) else None
        cells = [
            element("td", spread(values, 100, " %"), class_="best" if mean == best else "after")
            for values, mean in zip(after, means, strict=True)
        ]
        rows.append(element("tr", element("th", label, scope="row"), cells))
        if any(before):
            rows.append(_row(f"{label} untrained", (spread(values, 100, " %") for values in before), "before"))
            rows.append(_row(f"{label} gain in points", map(_gain, before, after), "before"))
    used = dict.fromkeys(
        key
        for group in groups
        for run in group.finished
        for key in run.result
        if key.startswith(f"{name}_") and "_top" not in key
    )
    for key in used:
        values = [dict.fromkeys(plain(run.result.get(key, "-")) for run in group.finished) for group in groups]
        if all(len(value) < 40 for group in values for value in group):  # what is longer has a place of its own
            rows.append(
                _row(key.removeprefix(f"{name}_").replace("_", " "), (", ".join(v) or "-" for v in values), "before")
            )
    return _body(words, rows)


def _gain(before, after):
    """The difference of the means in points."""
    if not before or not after:
        return "-"
    points = 100 * (statistics.mean(after) - statistics.mean(before))
    return f"{points:+.1f}".replace("-", MINUS)


def _training_rows(groups):
    rows = [
        _row("method", (group.method for group in groups)),
        _row("data", (group.data for group in groups)),
        _row("seed", (", ".join(plain(run.seed) for run in group.runs) for group in groups)),
    ]
    for name in ("epochs", "steps"):
        values = [dict.fromkeys(plain(value) for value in group.figures(name)) for group in groups]
        rows.append(_row(name, (", ".join(value) or "-" for value in values)))
    rows.append(_row("seconds", (spread(group.figures("seconds"), 1, "") for group in groups)))
    return rows


def _body(words, rows):
    title = element("tr", element("th", words, scope="rowgroup", colspan="1"), class_="title")
    return element("tbody", title, rows)


def _row(label, cells, kind=None):
    return element("tr", element("th", label, scope="row"), [element("td", cell) for cell in cells], class_=kind)


def plain(value):
    """A value of a configuration or a result as text."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def named_values(values):
    """A table of names and values; a value that is long is cut."""
    rows = [_row(name, [plain(value)]) for name, value in values.items()]
    return scrolling(element("table", element("tbody", rows), class_="values"), "names and values")


def folded(summary, *content, opened=False):
    """Content under a line that opens it."""
    return element("details", element("summary", summary), content, open=opened or None)


def background(groups):
    """Environment and full configuration of each group, folded away."""
    blocks = []
    for number, group in enumerate(groups):
        content = []
        for run in group.runs:
            of_seed = f", seed {plain(run.seed)}" if len(group.runs) > 1 else ""
            content.append(element("h4", f"Environment{of_seed}"))
            missing = element("p", "There is no readable environment.json.", class_="note")
            content.append(missing if run.environment is None else named_values(_flat_environment(run.environment)))
        of_seed = f", seed {plain(group.runs[0].seed)}" if len(group.runs) > 1 else ""
        text = yaml.safe_dump(group.config, sort_keys=False, default_flow_style=None, allow_unicode=True)
        content += [element("h4", f"Configuration{of_seed}"), element("pre", text, tabindex="0")]
        blocks.append(folded(element("span", swatch(number), group.name, class_="name"), content))
    return blocks


def _flat_environment(environment):
    values = {}
    for name, value in environment.items():
        if name == "command" and isinstance(value, list):
            value = " ".join(map(str, value))
        if isinstance(value, dict):
            value = ", ".join(f"{key} {plain(item)}" for key, item in value.items()) or "-"
        values[name] = value
    return values
