"""Several data sets in one command: each with its own statistics and views, one table, and errors before any work."""

import json
import math
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from iecl_fast.cli import main
from iecl_fast.data import DATASETS
from iecl_fast.engine.checkpoint import load_checkpoint, save_checkpoint
from iecl_fast.evaluate import from_checkpoint
from iecl_fast.evaluate.from_checkpoint import evaluate_checkpoint


def own_statistics(folder):
    """Directly from the files, of the 32 x 32 pixels in the middle of what is resized to that."""
    images = [Image.open(path).resize((32, 38), Image.Resampling.BILINEAR) for path in folder.glob("train/*/*.png")]
    pixels = np.stack([np.asarray(image)[3:35] for image in images]).astype(np.float64) / 255
    return pixels.mean(axis=(0, 1, 2)), pixels.std(axis=(0, 1, 2))


def test_two_folders_and_the_runs_own_data(checkpoint, folders, tmp_path, capsys):
    out = tmp_path / "out"
    names = [str(folders / "pairs"), str(folders / "triples"), "digits"]
    arguments = [word for name in names for word in ("--data", name)]
    command = ["evaluate", "knn", "--checkpoint", str(checkpoint), *arguments, "evaluate.knn_k=3"]
    assert main([*command, "--output", str(out)]) == 0
    results = json.loads((out / "result.json").read_text())["data_sets"]
    pairs, triples, digits = results
    assert [result["data"] for result in results] == names
    assert (pairs["train_images"], pairs["test_images"], triples["train_images"]) == (16, 6, 24)
    assert pairs["classes"] == ["dark", "light"] and triples["classes"] == ["a", "b", "c"]
    for result in (pairs, triples):
        confusion = np.array(result["knn_confusion"])
        assert result["knn_top1"] == pytest.approx(confusion.trace() / confusion.sum())
        assert list(result["knn_class_top1"].values()) == pytest.approx(confusion.diagonal() / 3)
        mean, std = own_statistics(folders / result["data"].rpartition("/")[2])
        assert result["mean"] == pytest.approx(mean, abs=1e-12) and result["std"] == pytest.approx(std, abs=1e-12)
    assert pairs["knn_top1"] == 1.0  # black and white
    assert digits["mean"] == list(DATASETS["digits"].mean) and digits["train_images"] == 1297
    assert sorted(path.name for path in out.iterdir()) == [
        *(f"confusion-{name}.png" for name in ("digits", "pairs", "triples")),
        "result.json",
        "table.md",
    ]
    table = (out / "table.md").read_text()
    assert table == capsys.readouterr().out
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
    assert lines[0][0] == "data" and lines[0][4] == "top-1" and len(lines) == 5
    assert lines[2] == ["pairs", "16", "6", "2", "100.0 %", "100.0 %", "100.0 %"]


def test_statistics_of_the_run_and_given_ones(checkpoint, folders):
    name = str(folders / "pairs")
    (run,) = evaluate_checkpoint("knn", checkpoint, data=[name], overrides={"evaluate": {"statistics": "run"}})
    assert run.summary["mean"] == list(DATASETS["digits"].mean)
    (given,) = evaluate_checkpoint(
        "knn", checkpoint, data=[name], overrides={"views": {"mean": [0.1, 0.2, 0.3], "std": None}}
    )
    assert given.summary["mean"] == [0.1, 0.2, 0.3]
    assert given.summary["std"] == pytest.approx(own_statistics(folders / "pairs")[1])


def test_an_encoder_that_looks_at_colours_sees_the_same_ones(cmc_checkpoint, folders, monkeypatch):
    """CMC's undoes the standardisation, so it has to know with which figures the images were standardised."""
    seen = []

    def look(backbone, train, *_, **options):
        seen.append((backbone.mean, train[0][0] * backbone.std + backbone.mean))
        return judge(backbone, train, *_, **options)

    judge = from_checkpoint.judge
    monkeypatch.setattr(from_checkpoint, "judge", look)
    for statistics in ("own", "run"):
        overrides = {"evaluate": {"statistics": statistics}}
        evaluate_checkpoint("knn", cmc_checkpoint, data=[str(folders / "triples")], overrides=overrides)
    (own_mean, own_colours), (run_mean, run_colours) = seen
    assert not torch.allclose(own_mean, run_mean)
    torch.testing.assert_close(own_colours, run_colours, atol=1e-5, rtol=0)
    assert own_colours.amin() >= -1e-5 and own_colours.amax() <= 1 + 1e-5


def test_a_run_from_before_the_protocols_had_names(checkpoint, tmp_path):
    state = load_checkpoint(checkpoint)
    evaluate = {"knn_k": 5, "linear_l2": 0.01, "linear_features": "pooled", "linear_epochs": 100, "linear_lr": 0.01}
    save_checkpoint(tmp_path / "old.ckpt", state | {"config": state["config"] | {"evaluate": evaluate}})
    (linear,) = evaluate_checkpoint("linear", tmp_path / "old.ckpt")
    assert (linear.summary["linear_protocol"], linear.summary["linear_l2"]) == ("lbfgs", 0.01)


def test_other_data_come_with_their_own_views_of_the_encoders_size(checkpoint, folders, monkeypatch):
    seen = []
    monkeypatch.setattr(from_checkpoint, "_evaluate", lambda protocol, state, path, config: seen.append(config.views))
    evaluate_checkpoint("linear", checkpoint, data=["digits", str(folders / "pairs")])
    digits, pairs = seen
    assert (digits["flip"], digits["rotate"], digits["image_size"]) == (0.0, 15.0, 32)
    assert (pairs["flip"], pairs["rotate"], pairs["image_size"]) == (0.5, 0.0, 32)


def test_two_folders_of_one_name(checkpoint, folders, tmp_path):
    copy = shutil.copytree(folders / "pairs", tmp_path / "pairs")
    arguments = ["--data", str(folders / "pairs"), "--data", str(copy), "--output", str(tmp_path / "out")]
    assert main(["evaluate", "knn", "--checkpoint", str(checkpoint), *arguments]) == 0
    assert (tmp_path / "out" / "confusion-pairs-2.png").exists()
    assert "| pairs-2 " in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "PAIRS", "--data", "dtdd"], "got 'dtdd'; did you mean dtd?"),
        (["--data", "PAIRS", "--data", "flowers102", "data.root=ROOT"], "flowers102 is not in"),
        (["--data", "PAIRS", "--data", "PAIRS"], "--data: each data set only once, got"),
        (["--data", "PAIRS", "data.name=digits"], "data.name=digits: there is --data already"),
        (["--data", "PAIRS", "data=rename"], "data: 'rename' is not allowed, data is a group"),
        (["--output", "/dev/null/out"], "--output: /dev/null/out is not allowed, /dev/null is no folder"),
        (["--data", "PAIRS", "evaluate.statistics=theirs"], "evaluate.statistics: 'theirs' is not allowed, it must be"),
        (["evaluate.labels=0"], "evaluate.labels: 0 is not allowed, it must be above 0 and at most 1"),
        (["evaluate.labels=1.5"], "evaluate.labels: 1.5 is not allowed"),
        (["evaluate.linear=rings"], "evaluate.linear: 'rings' is not allowed, it must be one of lbfgs, iecl, ring"),
        (["evaluate.linear_epochs=5"], "evaluate.linear_epochs: 5 is not allowed with evaluate.linear=lbfgs"),
        (["evaluate.finetune_epochs=0"], "evaluate.finetune_epochs: 0 is not allowed, it must be at least 1"),
        (["evaluate.finetune_lr=-1"], "evaluate.finetune_lr: -1 is not allowed, it must be above 0"),
    ],
)
def test_errors_come_before_any_work(checkpoint, folders, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(from_checkpoint, "_evaluate", lambda *_: pytest.fail("something was evaluated"))
    places = {"PAIRS": str(folders / "pairs"), "data.root=ROOT": f"data.root={tmp_path}"}
    arguments = [places.get(word, word) for word in arguments]
    assert main(["evaluate", "linear", "--checkpoint", str(checkpoint), *arguments]) == 2
    message = capsys.readouterr().err
    assert words in message and "Traceback" not in message


def test_all_data_are_looked_for_before_the_first_is_evaluated(checkpoint, folders, tmp_path, monkeypatch, capsys):
    """The training part is there and the test part is not."""
    monkeypatch.setattr(from_checkpoint, "_evaluate", lambda *_: pytest.fail("something was evaluated"))
    broken = shutil.copytree(folders / "pairs", tmp_path / "broken")
    shutil.rmtree(broken / "test")
    arguments = ["--data", str(folders / "triples"), "--data", str(broken)]
    assert main(["evaluate", "knn", "--checkpoint", str(checkpoint), *arguments]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_unreadable_images_are_counted_and_have_no_part(checkpoint, folders, tmp_path, capsys):
    """Numbers and statistics are those of the images that can be read."""
    copies = [shutil.copytree(folders / "pairs", tmp_path / name) for name in ("broken", "without")]
    names = ("train/dark/3.png", "test/dark/1.png", "test/light/0.png")
    for name in names:
        (copies[0] / name).write_bytes(b"")
        (copies[1] / name).unlink()
    results = []
    for copy in copies:
        out = tmp_path / f"{copy.name}-out"
        assert (
            main(["evaluate", "knn", "--checkpoint", str(checkpoint), "--data", str(copy), "--output", str(out)]) == 0
        )
        results.append(json.loads((out / "result.json").read_text()))
    error = capsys.readouterr().err
    for name in names:
        assert error.count(f"an image cannot be read and is left out: {copies[0]}/{name}: ") == 1
    counted = results[0].pop("unreadable_images"), results[1].pop("unreadable_images")
    assert counted == (3, 0)
    for result in results:
        del result["data"]
    assert results[0] == results[1]
    assert (results[0]["train_images"], results[0]["test_images"]) == (15, 4)


def test_an_encoder_with_nan_is_refused(checkpoint, tmp_path, capsys):
    state = torch.load(checkpoint, weights_only=True)
    name = next(name for name in state["method"] if name.endswith("backbone.bn1.running_var"))
    state["method"][name][0] = math.nan
    torch.save(state, tmp_path / "nan.ckpt")
    assert main(["evaluate", "knn", "--checkpoint", str(tmp_path / "nan.ckpt")]) == 2
    assert "the encoder holds numbers that are not finite, in bn1.running_var" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["$a{$", os.fsdecode(b"caf\xe9"), "<b>|"])
def test_names_of_data_and_classes_may_hold_anything(checkpoint, folders, tmp_path, capsys, name):
    copy = shutil.copytree(folders / "pairs", tmp_path / name)
    for part in ("train", "test"):
        (copy / part / "dark").rename(copy / part / name)
    data = ["--data", str(copy), "--data", str(folders / "triples")]
    command = ["evaluate", "knn", "--checkpoint", str(checkpoint), *data, "--output", str(tmp_path / "out")]
    assert main(command) == 0
    first = json.loads((tmp_path / "out" / "result.json").read_text())["data_sets"][0]
    assert first["classes"] == sorted([name, "light"])
    assert {line.replace("\\|", "").count("|") for line in capsys.readouterr().out.splitlines()} == {8}
