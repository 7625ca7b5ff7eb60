"""Sweeps over the values of a key: what the packaged ones compare, and the picture of what came out."""

import json

import pytest
import yaml
from matplotlib.axes import Axes

from iecl_fast.cli import main
from iecl_fast.engine import sweep as module
from iecl_fast.engine.accuracy_picture import draw_accuracies
from iecl_fast.engine.config import differences, merge, override, read_recipe, resolve
from iecl_fast.engine.errors import RunError, UsageError
from iecl_fast.engine.sweep_recipe import Axis, read_sweep, sweeps
from small_runs import SMALL_RUN


@pytest.mark.parametrize("name", sweeps())
def test_a_packaged_sweep_varies_its_key_alone(name):
    recipe = read_sweep(name)
    assert list(recipe.configs) == ["IE-CL", "MoCo"] and recipe.axis.key == "views.set"
    found = {}
    for label, config in recipe.configs.items():
        for value in recipe.axis.values:
            mapping = merge(merge(read_recipe(config), recipe.layer), recipe.axis.layer(value))
            found[label, value] = resolve(mapping).to_dict()
    values = recipe.axis.values
    assert values[0] == "full" and values[-1] == "crop_only"
    for label in recipe.configs:
        for value in values[1:]:
            changed = differences(found[label, "full"], found[label, value])
            assert changed == [("views.set", "full", value)]
    between = differences(found["IE-CL", "full"], found["MoCo", "full"])
    assert {key.partition(".")[0] for key, _, _ in between} == {"method", "saib"}  # only the method is another one
    assert all(found[label, "full"]["ring"] is None for label in recipe.configs)
    views = found["MoCo", "full"]["views"]
    assert views["jitter_probability"] > 0  # or leaving out the colour would change nothing
    assert ("no_gray" in values) == (views["gray"] > 0)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A sweep of two sets on a small run."""
    folder = tmp_path_factory.mktemp("sweeps")
    layer = override({}, (*SMALL_RUN[2:], "trainer.epochs=1", "data.limit=16"))
    sweep = {"configs": {"MoCo": "digits_moco"}, "key": "views.set", "values": ["full", "crop_only"]}
    (folder / "sets.yaml").write_text(yaml.safe_dump({"sweep": sweep, **layer}))
    return folder / "sets.yaml"


def test_runs_table_summary_and_picture(small, tmp_path, capsys):
    folder = tmp_path / "out"
    assert main(["sweep", str(small), "--output", str(folder), "seed=3"]) == 0
    table = capsys.readouterr().out.splitlines()
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary) == ["MoCo/full", "MoCo/crop_only"]
    for label, line in zip(summary, table[1:]):
        config = yaml.safe_load((folder / label / "seed3" / "config.yaml").read_text())
        assert config["views"]["set"] == label.partition("/")[2] and config["method"]["dim"] == 8
        result = json.loads((folder / label / "seed3" / "result.json").read_text())
        assert summary[label]["linear_top1"] == [result["linear_top1"]]
        assert line.startswith(label) and f"{100 * result['linear_top1']:.1f} %" in line
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "curves.png").exists()
    # Called again it reads what is there.
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("seed3/*")}
    assert main(["sweep", str(small), "--output", str(folder), "seed=3"]) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("seed3/*")} == before
    assert capsys.readouterr().out.splitlines()[:3] == table[:3]


def test_what_fails_is_left_out_of_the_picture(tmp_path, monkeypatch):
    drawn = []

    def stand_in(config, resume):
        if config.views["set"] == "no_color" or config.method["name"] == "iecl":
            raise RunError("the loss is nan")
        return None, dict.fromkeys(module.FIGURES, 0.5 + config.seed)

    monkeypatch.setattr(module, "pretrain", stand_in)
    monkeypatch.setattr(module, "write_json", lambda *_: None)
    monkeypatch.setattr(module, "draw_comparison", lambda *_: None)
    monkeypatch.setattr(module, "draw_accuracies", lambda lines, path, key, values: drawn.append((lines, key, values)))
    recipe = read_sweep("augmentations_digits")
    options = {"seeds": 2, "output": tmp_path, "layers": [recipe.layer], "axis": recipe.axis}
    results, failures = module.sweep(recipe.configs, **options)
    lines, key, values = drawn[-1]
    assert lines.keys() == {"MoCo"} and lines["MoCo"].keys() == {"full", "crop_only"}
    assert lines["MoCo"]["full"]["knn_top1"] == [0.5, 1.5]
    assert (key, values) == ("views.set", ("full", "no_color", "crop_only"))
    assert len(failures) == 8 and f"{tmp_path}/MoCo/no_color/seed0: the loss is nan" in failures
    assert results["IE-CL/full"]["knn_top1"] == []


def test_the_picture_has_means_and_deviations(tmp_path, monkeypatch):
    drawn, dotted = [], []
    real, real_line = Axes.errorbar, Axes.axhline

    def noting(axes, x, y, yerr, **style):
        drawn.append((style["label"], list(x), [round(v, 6) for v in y], [f"{v:.4f}" for v in yerr]))
        return real(axes, x, y, yerr=yerr, **style)

    def noting_line(axes, y, **style):
        dotted.append(round(y, 6))
        return real_line(axes, y, **style)

    monkeypatch.setattr(Axes, "errorbar", noting)
    monkeypatch.setattr(Axes, "axhline", noting_line)
    untrained = {"knn_top1_untrained": [0.2], "linear_top1_untrained": [0.3]}
    lines = {
        "IE-CL": {
            "full": {"knn_top1": [0.5, 0.7], "linear_top1": [0.6, 0.6], **untrained},
            "crop_only": {"knn_top1": [0.1, 0.1], "linear_top1": [0.2, 0.3], **untrained},
        },
        "MoCo": {"crop_only": {"knn_top1": [0.4], "linear_top1": [0.5], **untrained}},
    }
    draw_accuracies(lines, tmp_path / "accuracy.png", key="views.set", values=("full", "no_gray", "crop_only"))
    assert drawn == [
        ("IE-CL", [0, 2], [60.0, 10.0], ["14.1421", "0.0000"]),
        ("MoCo", [2], [40.0], ["nan"]),  # of one run there is no deviation
        ("IE-CL", [0, 2], [60.0, 25.0], ["0.0000", "7.0711"]),
        ("MoCo", [2], [50.0], ["nan"]),
    ]
    assert dotted == [20.0, 20.0, 30.0, 30.0]
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


def test_a_configuration_of_a_run_is_no_sweep(tmp_path):
    (tmp_path / "mine.yaml").write_text("seed: 1\n")
    assert read_sweep(str(tmp_path / "mine.yaml")) is None and read_sweep("digits") is None
    assert Axis("views.set", ("full",)).layer("full") == {"views": {"set": "full"}}
    assert Axis("seed", (1,)).layer(1) == {"seed": 1}


GOOD = {"configs": {"a": "digits"}, "key": "views.set", "values": ["full"]}


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ([1], r"sweep in .*bad\.yaml: \[1\] is not allowed, it must have the keys configs, key, values"),
        ({"configs": {"a": "digits"}}, "configs is not allowed, it must have the keys"),
        (GOOD | {"seeds": 3}, "configs, key, seeds, values is not allowed"),
        (GOOD | {"configs": ["digits"]}, r"sweep\.configs in .*\['digits'\] is not allowed, it must name a recipe for"),
        (GOOD | {"configs": {}}, "it must name a recipe"),
        (GOOD | {"configs": {"a": 3}}, "it must name a recipe"),
        (GOOD | {"configs": {"a/b": "digits"}}, r"sweep\.configs in .*: a/b: labels must be names for folders"),
        (GOOD | {"configs": {"..": "digits"}}, "labels must be names for folders"),
        (GOOD | {"key": "views set"}, r"sweep\.key in .*'views set' is not allowed, it must be a key"),
        (GOOD | {"key": 3}, r"sweep\.key in .*: 3 is not allowed"),
        (GOOD | {"values": "full"}, r"sweep\.values in .*'full' is not allowed, it must be a list"),
        (GOOD | {"values": []}, r"sweep\.values in .*\[\] is not allowed"),
        (GOOD | {"values": ["full", "full"]}, "different plain values"),
        (GOOD | {"values": ["full", [1]]}, "different plain values"),
        (GOOD | {"values": ["../full"]}, "different plain values"),
    ],
)
def test_a_bad_sweep_is_said_with_its_file(tmp_path, sweep, words):
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump({"sweep": sweep}))
    with pytest.raises(UsageError, match=words):
        read_sweep(str(path))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["augmentation_cifar10"], "did you mean augmentations_cifar10?"),
        (["augmentations_digits", "digits"], "a sweep names its own configurations, give it alone"),
        (["keys.yaml"], "did you mean views.set?"),
        (["values.yaml"], "views.set: 'none' is not allowed, it must be one of full, no_gray, no_color, crop_only"),
        (["recipes.yaml"], "did you mean digits?"),
    ],
)
def test_usage_errors(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, change in (("keys", {"key": "views.sett"}), ("values", {"values": ["none"]})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"sweep": GOOD | change}))
    (tmp_path / "recipes.yaml").write_text(yaml.safe_dump({"sweep": GOOD | {"configs": {"a": "digts"}}}))
    assert main(["sweep", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
