"""The pieces of a page by themselves: gathering, curves, classes, neighbours, the plane."""

import itertools
import json
import re
import shutil
from importlib import resources
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset

from iecl_fast.data import LabelledImages
from iecl_fast.engine.errors import RunError, UsageError
from iecl_fast.report import samples
from iecl_fast.report.charts import GLYPHS, SERIES, scatter
from iecl_fast.report.classes import evaluation_blocks, run_results
from iecl_fast.report.curves import UNIT, curve_panels, ticks
from iecl_fast.report.html import Markup, element
from iecl_fast.report.pictures import neighbour_cards
from iecl_fast.report.projection import project
from iecl_fast.report.runs import Evaluation, Group, Run, differing_settings, gather
from report_pages import Page


def run_with(metrics=(), **parts):
    return Run(SimpleNamespace(path="a"), {"seed": 0, "method": {"name": "moco"}}, metrics=list(metrics), **parts)


def test_text_becomes_markup_only_through_element():
    made = element(
        "p", "<&>", Markup("<b>x</b>"), ["1", None, element("img", alt='"')], class_="a b", data_x=3, hidden=True
    )
    assert made == '<p class="a b" data-x="3" hidden>&lt;&amp;&gt;<b>x</b>1<img alt="&quot;"/></p>'


def test_gathering_runs_sweeps_and_recipes(runs):
    groups, loose = gather([runs / "iecl", runs / "sweep", runs / "iecl", runs / "sweep" / "warm"])
    assert loose == []
    assert [group.name for group in groups] == ["iecl", "warm"]
    assert [run.seed for run in groups[1].runs] == [3, 10]  # in the order of numbers, not of letters
    assert groups[1].figures("knn_top1") == [0.5, 0.75]
    for folder, names in ((runs / "sweep" / "warm" / "seed10", ["warm"]), (runs, ["iecl", "moco", "sweep/warm"])):
        assert [group.name for group in gather([folder])[0]] == names


def test_seeds_given_one_by_one_are_one_group(runs):
    seeds = sorted((runs / "sweep" / "warm").iterdir(), reverse=True)
    assert len(seeds) > 1
    (group,), _ = gather(seeds)
    assert group.name == "warm"
    assert [run.seed for run in group.runs] == sorted(run.seed for run in group.runs)
    assert {run.folder.path for run in group.runs} == set(seeds)


def test_a_sweep_over_values_is_in_the_order_it_was_asked_for(runs, tmp_path):
    values = ("ten", "nine", "0.1")
    for value in values:
        shutil.copytree(runs / "sweep" / "warm" / "seed3", tmp_path / "cold" / value / "seed3")
    (tmp_path / "summary.json").write_text(json.dumps({f"cold/{value}": {} for value in values}))
    assert [group.name for group in gather([tmp_path])[0]] == [f"cold/{value}" for value in values]


def test_runs_of_one_name_are_told_apart(runs, copy):
    names = [group.name for group in gather([runs / "moco", copy("moco", "moco")])[0]]
    assert len(set(names)) == 2 and all(name.endswith("/moco") for name in names)
    with pytest.raises(UsageError, match="there is no run folder"):
        gather([runs / "moco", runs / "none"])


def test_settings_that_differ():
    groups = [
        Group("a", [Run(None, {"seed": 0, "output": "a", "method": {"name": "moco", "dim": 8}, "ring": None})]),
        Group("b", [Run(None, {"seed": s, "output": "b", "method": {"name": "byol"}, "ring": None}) for s in (1, 2)]),
    ]
    assert differing_settings(groups) == {"seed": [0, [1, 2]], "method.name": ["moco", "byol"], "method.dim": [8, "-"]}
    assert differing_settings(groups[:1]) == {}


def test_curves_lie_where_the_numbers_say():
    rows = [{"step": step, "epoch": 1, "loss": value} for step, value in ((10, 4.0), (20, 3.0), (30, 2.0))]
    other = [{"step": step, "epoch": 1, "loss": float("nan"), "kl": 1.0} for step in (10, 50)]
    panels = curve_panels([Group("<a>", [run_with(rows)]), Group("b", [run_with(other)])])
    page = Page("".join(panels))
    assert page.problems == []
    assert [text for _, text in page.named("figcaption")] == ["loss", "kl"]
    curve = page.named("svg", "curve")[0][0]
    assert curve["aria-label"] == "loss over the steps: <a> from 4 to 2"
    low, high = map(float, curve["data-y"].split())
    assert curve["data-x"] == "10.0 50.0" and low < 2 < 4 < high
    (line,) = page.named("polyline", "bold")[:1]
    points = [tuple(map(float, point.split(","))) for point in line[0]["points"].split()]
    expected = [
        (UNIT * (step - 10) / 40, UNIT * (high - value) / (high - low)) for step, value in ((10, 4), (20, 3), (30, 2))
    ]
    np.testing.assert_allclose(points, expected, atol=0.5)


def test_curves_of_seeds_have_a_mean_and_long_ones_are_thinned():
    seeds = [run_with([{"step": s, "epoch": 1, "loss": float(k)} for s in range(5000)]) for k in (1, 3)]
    page = Page("".join(curve_panels([Group("a", seeds)])))
    thin, bold = page.named("polyline", "thin"), page.named("polyline", "bold")
    assert (len(thin), len(bold)) == (2, 1)
    heights = [float(line[0]["points"].split()[0].split(",")[1]) for line in (*thin, *bold)]
    assert heights[1] < heights[2] < heights[0]  # 3 above their mean above 1
    assert all(len(line[0]["points"].split()) <= 400 for line in thin)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [((0, 10), [0, 2, 4, 6, 8, 10]), ((-0.5, 0.26), [-0.4, -0.2, 0, 0.2]), ((1, 1.0001), None), ((3e8, 9e8), None)],
)
def test_ticks_are_round_and_inside(limits, expected):
    numbers = [number for number, _ in ticks(*limits, 5)]
    assert 2 <= len(numbers) <= 6 and all(limits[0] <= number <= limits[1] for number in numbers)
    if expected is not None:
        np.testing.assert_allclose(numbers, expected, atol=1e-12)


def evaluated(tmp_path, *results):
    return evaluation_blocks("run", Evaluation("linear", tmp_path, list(results)), ["<cat>", "dog", "fox"])


def test_an_evaluation_shows_classes_and_confusions(tmp_path):
    confusion = [[8, 2, 0], [1, 9, 0], [0, 5, 5]]
    by_class = {"<cat>": 0.8, "dog": 0.9, "fox": 0.5, "owl": None}
    result = {"linear_confusion": confusion, "linear_class_top1": by_class, "linear_top1": 0.73}
    page = Page("".join(evaluated(tmp_path, result)))
    assert page.problems == []
    counts = [text for attributes, text in page.named("td") if attributes.get("style")]
    assert counts == [str(count) for row in confusion for count in row]
    assert "fox as dog, 50.0 %; <cat> as dog, 20.0 %; dog as <cat>, 10.0 %" in page.text
    assert [text for _, text in page.named("span", "name")] == ["fox", "<cat>", "dog"]  # the worst first
    assert "73.0 %" in page.text and "linear_class_top1" not in page.text


def test_confusions_of_many_classes_are_a_picture(tmp_path):
    by_class = {str(number): 0.1 for number in range(50)}
    page = Page("".join(evaluated(tmp_path, {"knn_confusion": np.eye(30).tolist(), "box_map_per_class": by_class})))
    assert page.named("img", "heat")[0][0]["alt"].startswith("confusions of 30 classes")
    assert "10 better ones are left out" in page.text
    assert run_results("run", run_with(result={"knn_top1": 0.5}), None) == []


def test_results_with_other_values_are_shown_plainly(tmp_path):
    odd = {"linear_per_class": "n/a", "linear_confusion": [[1, 2]], "notes": ["x" * 500]}
    page = Page("".join(evaluated(tmp_path, odd)))
    assert page.problems == [] and "n/a" in page.text and "xxx" not in page.text
    assert json.dumps([[1, 2]]) in page.text


def test_evaluations_come_to_their_run_or_stand_alone(runs, tmp_path):
    checkpoint = str(runs / "moco" / "checkpoints" / "last.ckpt")
    for name, content in (
        ("own", {"checkpoint": checkpoint, "knn_top1": 0.5}),
        ("several", {"data_sets": [{"checkpoint": checkpoint, "data": "a"}, {"checkpoint": checkpoint, "data": "b"}]}),
        ("foreign", {"checkpoint": "elsewhere"}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(content))
    Image.new("RGB", (4, 4)).save(tmp_path / "foreign" / "predictions.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "foreign" / "confusion.png")
    (group,), loose = gather([runs / "moco", *(tmp_path / name for name in ("own", "several", "foreign", "own"))])
    assert [one.name for one in group.runs[0].evaluations] == ["own", "several"]
    assert [result["data"] for result in group.runs[0].evaluations[1].results] == ["a", "b"]
    page = Page("".join(evaluation_blocks("", *loose, None)))
    assert [attributes["alt"] for attributes, _ in page.named("img")] == ["foreign, predictions"]


@pytest.fixture
def seen():
    """A `Look` at 6 test images and 30 training images of 3 classes, with features by chance."""
    generator = torch.Generator().manual_seed(0)
    source = [(Image.new("L", (8, 8), number), number % 3) for number in range(40)]
    labels = torch.arange(40) % 3
    images = LabelledImages(source, labels, ["a", "b", "c"], torch.arange(40).flip(0))
    tests, gallery = Subset(images, torch.arange(6)), Subset(images, torch.arange(10, 40))
    features = [torch.nn.functional.normalize(torch.randn(n, 5, generator=generator), dim=1) for n in (6, 30)]
    return samples.Look(
        step=1,
        classes=images.classes,
        tests=tests,
        gallery=gallery,
        test_labels=images.labels[tests.indices],
        gallery_labels=images.labels[gallery.indices],
        test_features=features[0],
        gallery_features=features[1],
        total_tests=6,
        total_gallery=30,
        unreadable=[],
    )


def test_neighbours_are_the_most_similar(seen):
    found = samples.nearest(seen)
    assert sorted(seen.test_labels[found.queries].tolist()) == [0, 1, 2]
    for query, places, similarities in zip(found.queries, found.places, found.similarities):
        all_similarities = [float(seen.test_features[query] @ row) for row in seen.gallery_features]
        best = sorted(range(30), key=lambda place: -all_similarities[place])[: samples.NEIGHBOURS]
        assert places.tolist() == best
        np.testing.assert_allclose(similarities, [all_similarities[place] for place in best], atol=1e-6)


def test_cards_say_what_is_right(seen):
    cards = neighbour_cards([(0, "<one>", seen), (1, "two", seen)])
    found = samples.nearest(seen)
    assert len(cards) == 3
    for card, query, places in zip(cards, found.queries, found.places, strict=True):
        page = Page(card)
        assert page.problems == []
        wanted = int(seen.test_labels[query])
        labels = seen.gallery_labels[places].tolist()
        marks = ["\N{CHECK MARK}" if label == wanted else "\N{MULTIPLICATION X}" for label in labels]
        assert [text for _, text in page.named("span", "mark")] == 2 * marks
        assert [text for _, text in page.named("span", "class")] == 2 * [seen.classes[label] for label in labels]
        sides = [attributes.get("class") for attributes, _ in page.named("figure")]
        assert sides == ["query", *2 * ["right" if label == wanted else "wrong" for label in labels]]
        assert f" {labels.count(wanted)} of 8" in page.text and "<one>" in page.text
        assert page.named("img")[0][0]["alt"] == f"query: {seen.classes[wanted]}"


def test_a_picture_is_the_image_that_the_feature_was_of(seen):
    image, label = samples.picture(seen.gallery, 0)
    assert image.getpixel((0, 0)) == (29, 29, 29)  # row 10 of 39, 38, ...
    assert label == 29 % 3 == int(seen.gallery_labels[0])


def test_of_many_classes_a_few_are_shown():
    labels = torch.arange(5000) % 100
    rows = samples._test_rows(labels)
    assert len(labels[rows].unique()) == samples.CLASSES and len(rows) == samples.TESTS
    assert len(samples._test_rows(labels[:200] % 20)) == 200


def blobs():
    """Three groups of unit rows that lie far from one another, and which is which."""
    generator = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], 20)
    points = np.eye(8)[labels] + 0.05 * generator.standard_normal((60, 8))
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32), labels


@pytest.mark.parametrize("method", ["UMAP", "t-SNE"])
def test_the_plane_keeps_neighbourhoods_and_is_the_same_again(method, request):
    if method == "UMAP":
        pytest.importorskip("umap", reason="umap-learn is not installed")
    else:
        request.getfixturevalue("without_umap")
    features, labels = blobs()
    points, words = project(features)
    assert words.startswith(method) and "seed 0" in words
    assert (
        points.shape == (60, 2)
        and points.min() >= 0
        and points.max() <= 1
        and np.isclose(np.ptp(points, axis=0).max(), 1)
    )
    distances = np.linalg.norm(points[:, None] - points[None], axis=2) + 9 * np.eye(60)
    assert (labels[distances.argmin(axis=1)] == labels).all()
    np.testing.assert_array_equal(project(features)[0], points)


def test_no_plane_for_few_or_collapsed_features():
    with pytest.raises(RunError, match="there are 5 test images"):
        project(np.eye(5, dtype=np.float32))
    with pytest.raises(RunError, match="collapsed"):
        project(np.full((20, 4), 0.5, dtype=np.float32))


def test_every_class_has_a_sign_of_its_own():
    labels = np.arange(samples.CLASSES)
    page = Page(scatter(np.random.default_rng(0).random((len(labels), 2)), labels, [f"<{n}>" for n in labels], "plane"))
    assert page.problems == []
    entries = [(attributes["style"], text) for attributes, text in page.named("button")]
    glyphs = [
        attributes["d"].removeprefix("M6 6") for attributes, _ in page.named("path") if attributes["d"][:4] == "M6 6"
    ]
    assert len({(style, glyph) for (style, _), glyph in zip(entries, glyphs, strict=True)}) == samples.CLASSES
    assert set(glyphs) == set(GLYPHS) and [text for _, text in entries][3] == "<3>"


# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
EYES = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def linear(colour):
    values = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """WCAG 2's ratio of luminances."""
    low, high = sorted((TO_XYZ @ linear(colour))[1] for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb):
    scaled = TO_XYZ @ np.clip(rgb, 0, 1) / (0.95047, 1, 1.08883)
    f = np.where(scaled > 216 / 24389, np.cbrt(scaled), (24389 / 27 * scaled + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_are_seen_and_told_apart(scheme):
    """WCAG 2: 3:1 for drawings, 4.5:1 for text. Lab distance 20: nine times what is just noticed."""
    style = resources.files("iecl_fast").joinpath("report", "page.css").read_text()
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", {"light": light, "dark": dark.split("@media")[0]}[scheme]))
    series = [colours[f"series-{number}"] for number in range(SERIES)]
    for name in ("text", "muted", "link", "right", "wrong"):
        assert min(contrast(colours[name], colours[under]) for under in ("page", "card")) >= 4.5, name
    assert contrast(colours["warn"], colours["warn-page"]) >= 4.5
    assert min(contrast(colour, colours["card"]) for colour in series) >= 3
    for eyes, matrix in EYES.items():
        seen = [lab(np.array(matrix) @ linear(colour)) for colour in series]
        for one, other in itertools.combinations(range(SERIES), 2):
            assert np.linalg.norm(seen[one] - seen[other]) > 20, (eyes, one, other)


def test_the_printed_page_has_the_light_colours():
    style = resources.files("iecl_fast").joinpath("report", "page.css").read_text()
    series = re.findall(r"--series-(\d): (#[0-9a-f]{6})", style)
    assert len(series) == 3 * SERIES and series[:SERIES] == series[2 * SERIES :]
