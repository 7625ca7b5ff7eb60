"""Whole runs with SAIB: what they leave, that they resume exactly, and what is refused before they start."""

import json
import signal
import subprocess
import sys

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from iecl_fast.cli import main
from iecl_fast.engine.checkpoint import load_checkpoint, save_checkpoint
from iecl_fast.engine.logging import RunLog, read_metrics
from small_runs import SMALL_IECL
from test_pretrain import assert_same_run, kill_at


def arguments(folder, *overrides):
    return ["pretrain", "--output", str(folder), *SMALL_IECL, *overrides]


@pytest.fixture(scope="module", params=["patch", "batch"])
def channels(request):
    return request.param


@pytest.fixture(scope="module")
def iecl_run(tmp_path_factory, channels):
    """The default recipe, uninterrupted."""
    folder = tmp_path_factory.mktemp("iecl") / "run"
    assert main(arguments(folder, f"saib.channels={channels}")) == 0
    return folder


def test_metrics_have_every_term(iecl_run):
    rows = read_metrics(iecl_run / "metrics.csv")
    assert len(rows) == 18
    for row in rows:
        assert row["loss"] == pytest.approx(row["contrast"] + row["kl"] + row["entropy"], rel=1e-5)
    assert {"sigma", "entropy_anchor", "entropy_query", "effective_rank", "ring_lower"} <= rows[0].keys()
    assert rows[-1]["entropy"] == pytest.approx(-0.02 * rows[-1]["entropy_query"], rel=1e-4)
    # Measured at steps 1, 5, 9, ...; between them the last figure stands.
    jacobians = [row["jacobian"] for row in rows]
    assert [step for step in range(1, 18) if jacobians[step] != jacobians[step - 1]] == [4, 8, 12, 16]
    assert all(0 < row["jacobian_error"] < 0.1 for row in rows)


def test_pictures_of_the_views(iecl_run):
    assert (iecl_run / "views.png").stat().st_size > 10_000
    events = EventAccumulator(str(iecl_run / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    assert [event.step for event in events.Images("views")] == [6, 12, 18]
    assert "jacobian" in events.Tags()["scalars"]


def test_the_block_has_its_own_weight_decay(iecl_run):
    state = load_checkpoint(iecl_run / "checkpoints" / "last.ckpt")
    groups = state["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [5e-4, 1e-4]
    assert len(groups[1]["params"]) == 5


def test_stopped_and_resumed_is_the_uninterrupted_run(iecl_run, channels, tmp_path, monkeypatch):
    """Spectral norm's vectors, SAIB, the key encoder, the ring's schedule and the last measurement all go on."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", kill_at(8, signal.SIGTERM))
        assert main(arguments(folder, f"saib.channels={channels}")) == 143
    state = load_checkpoint(folder / "checkpoints" / "last.ckpt")["method"]
    assert state["jacobian_step"] == 4
    assert "encoder.backbone.conv1.parametrizations.weight.0._u" in state
    assert main(["pretrain", "--resume", str(folder)]) == 0
    assert_same_run(folder, iecl_run)


def test_evaluation_of_the_checkpoint(iecl_run, channels, tmp_path, capsys):
    assert main(["evaluate", "knn", "--checkpoint", str(iecl_run), "--output", str(tmp_path / "out")]) == 0
    evaluated = json.loads((tmp_path / "out" / "result.json").read_text())
    assert evaluated["knn_top1"] == json.loads((iecl_run / "result.json").read_text())["knn_top1"]
    other = {"patch": "batch", "batch": "patch"}[channels]
    assert main(["evaluate", "knn", "--checkpoint", str(iecl_run), f"saib.channels={other}"]) == 2
    assert "saib cannot be changed" in capsys.readouterr().err


@pytest.mark.parametrize("channels", ["batch"], indirect=True)
def test_a_block_for_whole_batches_needs_as_many_devices_again(iecl_run, tmp_path, capsys):
    path = iecl_run / "checkpoints" / "last.ckpt"
    state = load_checkpoint(path)
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text((iecl_run / "config.yaml").read_text())
    save_checkpoint(folder / "checkpoints" / "last.ckpt", state | {"rng": state["rng"] * 2})
    assert main(["pretrain", "--resume", str(folder)]) == 2
    assert "trainer.devices: 1 is not allowed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["saib.channels=batch", "trainer.batch_size=64"],
            "trainer.batch_size: 64 is not allowed with saib.channels=batch",
        ),
        (["saib.patch_size=5"], "saib.patch_size: 5 is not allowed, it must divide views.image_size=32"),
        (["saib.patch_size=0"], "saib.patch_size: 0 is not allowed"),
        (["saib.expansion=monotone", "saib.activation=silu"], "saib: activation = 'silu' is not allowed"),
        (["saib.chanels=batch"], "did you mean saib.channels?"),
        (["saib.cascade=0"], "saib.cascade: 0 is not allowed, it must be at least 1"),
        (["method.entropy_weight=-1"], "method: entropy_weight must be at least 0"),
        (["method.kl_variance=-2"], "method: kl_variance must be diagonal, full or a positive number"),
        (["method.entropy=renyi"], "method.entropy: 'renyi' is not allowed"),
        (["method.jacobian_steps=-1"], "method: jacobian_steps must be at least 0"),
    ],
)
def test_refused_before_the_training(tmp_path, capsys, overrides, words):
    assert main(arguments(tmp_path / "run", *overrides)) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["simclr", "byol", "simsiam"])
def test_every_method_runs_from_the_default_recipe(tmp_path, name):
    options = [text for text in SMALL_IECL if "num_keys" not in text]
    folder = tmp_path / name
    command = ["pretrain", "--method", name, "--output", str(folder), *options, "--epochs", "1", "method.spectral=true"]
    assert main(command) == 0
    rows = read_metrics(folder / "metrics.csv")
    assert {"entropy", "entropy_query", "jacobian", "sigma"} <= rows[0].keys()
    assert all(torch.tensor(list(row.values())).isfinite().all() for row in rows)
    assert (folder / "views.png").exists()


def test_without_a_block_there_is_no_picture_of_it(tmp_path):
    assert main(arguments(tmp_path / "run", "saib=null", "trainer.epochs=1")) == 0
    assert not (tmp_path / "run" / "views.png").exists()
    assert "jacobian" not in read_metrics(tmp_path / "run" / "metrics.csv")[0]


def test_two_processes_with_a_block_for_their_part_of_the_batch(tmp_path):
    folder = tmp_path / "run"
    options = ["saib.channels=batch", "trainer.devices=2", "trainer.accelerator=cpu", "trainer.epochs=1"]
    command = [sys.executable, "-m", "iecl_fast.cli", *arguments(folder, *options, "method.jacobian_steps=0")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    state = load_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert state["method"]["saib.w1"].shape == (4, 4, 1, 1)
    assert (folder / "views.png").exists()
    assert main(["evaluate", "knn", "--checkpoint", str(folder)]) == 0
