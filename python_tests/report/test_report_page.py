"""The whole page: what is on it, that it needs nothing beside itself, and what the command refuses."""

import json
import re
import shutil
import statistics

import pytest
import torch

from iecl_fast.cli import main
from iecl_fast.engine.checkpoint import load_checkpoint, save_checkpoint
from iecl_fast.report import page as module
from report_pages import Page

HOSTILE = "<img src=x onerror=alert(1)>&\"'"


def percent(value):
    return f"{100 * value:.1f} %"


def cells(page):
    return [text for _, text in page.named("td")]


def test_everything_is_on_the_page(whole, runs):
    page = Page(whole)
    assert page.problems == []
    for key in ("accuracies", "curves", "neighbours", "features", "views", "background"):
        assert page.section(key), key
        assert any(attributes["href"] == f"#{key}" for attributes, _ in page.named("a"))
    for name in ("iecl", "moco"):
        result = json.loads((runs / name / "result.json").read_text())
        for figure in ("knn_top1", "linear_top1", "linear_top5", "knn_top1_untrained", "linear_top1_untrained"):
            assert percent(result[figure]) in cells(page)
        assert f"{result['seconds']:.1f}" in cells(page)
    assert {"method.head", "method.name", "saib.channels"} <= {text for _, text in page.named("code")}
    panels = [text for attributes, text in page.named("figcaption")]
    assert {"loss", "contrast", "entropy query", "positive similarity"} <= set(panels)
    assert "t-SNE, perplexity 5.67, seed 0, all 18 test images, step 6" in page.text
    assert "views.png" not in page.text and len(page.named("img")) > 3 * 8


def test_runs_of_a_sweep_are_one_column_with_mean_and_deviation(whole, runs):
    page = Page(whole)
    assert f"62.5 ± {100 * statistics.stdev([0.5, 0.75]):.1f} %" in cells(page)
    heads = [attributes for attributes, _ in page.named("th") if attributes.get("scope") == "col"]
    assert len(heads) == 3
    assert "2 seeds" in page.text and "3, 10" in cells(page)


def test_it_asks_for_nothing_outside(whole):
    page = Page(whole)
    assert re.search(r"https?:|url\(|@import", whole) is None
    for name, attributes, _ in page.elements:
        for key in ("src", "href", "srcset", "poster", "data", "action", "xlink:href"):
            address = attributes.get(key)
            assert address is None or address.startswith(("data:", "#")), (name, key, address)
        assert not [key for key in attributes if key.startswith("on")]
        assert name not in ("iframe", "object", "embed", "base", "form")
    policy = next(a["content"] for a, _ in page.named("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; img-src data:;")


def test_for_readers_of_every_kind(whole):
    page = Page(whole)
    assert page.named("html")[0][0]["lang"] == "en"
    assert page.named("title")[0][1] == "Report: iecl, moco, warm"
    assert len(page.named("h1")) == 1
    assert all(attributes.get("alt") for attributes, _ in page.named("img"))
    drawings = [attributes for attributes, _ in page.named("svg") if attributes.get("role") == "img"]
    assert len(drawings) > 10 and all(attributes["aria-label"] for attributes in drawings)
    assert any(attributes.get("name") == "viewport" for attributes, _ in page.named("meta"))
    identifiers = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))


def test_names_of_runs_and_classes_are_text(make_report, copy):
    folder = copy("moco", HOSTILE)
    (folder / "linear").mkdir()
    (folder / "linear" / "result.json").write_text(json.dumps({HOSTILE: HOSTILE, "checkpoint": "</pre><script>"}))
    text = make_report(folder)
    page = Page(text)
    assert page.problems == []
    assert HOSTILE in page.named("h1")[0][1]
    assert "<b>dark" in page.text and 'grey & "fog"' in page.text
    assert len(page.named("script")) == 1 and page.named("b") == []
    assert not any(attributes.get("src") == "x" for attributes, _ in page.named("img"))


def test_what_is_missing_is_said(make_report, copy, images):
    unfinished = copy("moco", "unfinished")
    (unfinished / "result.json").unlink()
    bare = copy("moco", "bare")
    shutil.rmtree(bare / "checkpoints")
    for name in ("metrics.csv", "result.json", "environment.json"):
        (bare / name).unlink()
    damaged = copy("moco", "damaged")
    (damaged / "result.json").write_text('{"knn')
    (damaged / "metrics.csv").write_text("step,epoch,loss\n1,1,x\n")
    (damaged / "checkpoints" / "last.ckpt").write_bytes(b"PK")
    page = Page(make_report(unfinished, bare, damaged))
    assert page.problems == []
    notes = [text for _, text in page.named("p", "warning")]
    assert any("There is no checkpoint" in note for note in notes)
    assert sum("damaged" in note for note in notes) == 3
    assert any("damaged/result.json" in note for note in notes)
    assert any("metrics.csv" in note for note in notes)
    assert any("last.ckpt" in note for note in notes)
    assert "unfinished: step 6, epoch 2 of 2" in page.text
    assert "unfinished: no step was logged" in page.text
    assert page.section("neighbours") and page.section("curves")  # of the first


def test_a_single_run_without_anything_but_its_configuration(make_report, copy):
    bare = copy("moco")
    for entry in bare.iterdir():
        if entry.name != "config.yaml":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    page = Page(make_report(bare))
    assert page.problems == [] and page.section("accuracies")
    assert not page.section("curves") and not page.section("features")


def test_data_that_is_gone_costs_only_its_sections(make_report, copy, images, tmp_path):
    folder = copy("moco")
    state = load_checkpoint(folder / "checkpoints" / "last.ckpt")
    state["config"]["data"]["name"] = str(tmp_path / "gone")
    save_checkpoint(folder / "checkpoints" / "last.ckpt", state)
    page = Page(make_report(folder))
    assert any("gone" in text and "cannot be looked at" in text for _, text in page.named("p", "warning"))
    assert page.section("curves") and not page.section("neighbours")


def test_images_that_cannot_be_read_are_left_out_and_named(make_report, copy, images, tmp_path):
    tree = shutil.copytree(images, tmp_path / "spoilt")
    folder = copy("moco")
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    state["config"]["data"]["name"] = str(tree)
    torch.save(state, folder / "checkpoints" / "last.ckpt")
    (tree / "test" / "light" / "0.png").write_bytes(b"")
    (tree / "train" / "light" / "0.png").write_bytes(b"")
    page = Page(make_report(folder))
    for part in ("test", "train"):
        assert f"An image cannot be read and is left out: {tree}/{part}/light/0.png" in page.text
    assert "the most similar of 23 of 24 training images" in page.text
    assert "17 of 18 test images" in page.text


def test_a_checkpoint_from_before_a_setting_of_the_evaluation_will_do(make_report, copy):
    folder = copy("moco")
    state = load_checkpoint(folder / "checkpoints" / "last.ckpt")
    state["config"]["evaluate"]["linear_nothing"] = 1
    save_checkpoint(folder / "checkpoints" / "last.ckpt", state)
    page = Page(make_report(folder))
    assert page.named("p", "warning") == [] and page.section("neighbours")


def test_an_existing_file_is_not_overwritten(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.html").write_text("mine")
    monkeypatch.setattr(module, "report", pytest.fail)
    assert main(["report", str(runs / "moco")]) == 2
    assert "report.html exists already and is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "report.html").read_text() == "mine"


def test_a_failed_write_leaves_nothing(runs, tmp_path, monkeypatch, capsys):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "report", lambda _: "<html>")
    monkeypatch.setattr("os.fsync", full)
    assert main(["report", str(runs / "moco"), "--output", str(tmp_path / "r.html")]) == 1
    assert "No space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "required: RUN"),
        (["nothing"], "there is no run folder nothing"),
        (["thesis"], "thesis is no run folder, it has no config.yaml"),
        (["broken"], "broken/config.yaml is not valid YAML"),
    ],
)
def test_usage_errors(names, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis" / "seed0").mkdir(parents=True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.yaml").write_text("trainer: [1\n")
    assert main(["report", *names]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
