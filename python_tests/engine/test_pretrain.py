"""Whole runs: what they leave, that they go on exactly after any end, and what they refuse."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import yaml

from iecl_fast.cli import main
from iecl_fast.engine import run
from iecl_fast.engine.checkpoint import load_checkpoint, save_checkpoint
from iecl_fast.engine.errors import RunError
from iecl_fast.engine.logging import RunLog, read_metrics

TIMES = ("seconds",)


def result(folder):
    values = json.loads((folder / "result.json").read_text())
    return {key: value for key, value in values.items() if key not in TIMES}


def weights(folder):
    return load_checkpoint(folder / "checkpoints" / "last.ckpt")["method"]


def assert_same_run(one, other):
    assert result(one) == result(other)
    assert (one / "metrics.csv").read_text() == (other / "metrics.csv").read_text()
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_what_a_run_folder_holds(whole_run):
    files = {"config.yaml", "environment.json", "metrics.csv", "curves.png", "result.json"}
    assert {path.name for path in whole_run.iterdir()} == files | {"checkpoints", "tensorboard"}
    assert [path.name for path in (whole_run / "checkpoints").iterdir()] == ["last.ckpt"]

    values = json.loads((whole_run / "result.json").read_text())
    for name in ("knn_top1", "linear_top1", "knn_top1_untrained", "linear_top1_untrained"):
        assert 0 < values[name] < 1
    assert values["seconds"] > 0
    assert values["knn_k"] == 48  # clipped from 200
    assert values["steps"] == 18

    config = yaml.safe_load((whole_run / "config.yaml").read_text())
    assert config["trainer"]["epochs"] == 3
    assert config["output"] == str(whole_run)
    environment = json.loads((whole_run / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert (whole_run / "curves.png").stat().st_size > 10_000


def test_metrics_follow_the_run(whole_run):
    rows = read_metrics(whole_run / "metrics.csv")
    assert [row["step"] for row in rows] == list(range(1, 19))
    assert [row["epoch"] for row in rows] == [1] * 6 + [2] * 6 + [3] * 6
    assert rows[0]["learning_rate"] > rows[-1]["learning_rate"] > 0
    assert rows[0]["ring_lower"] == 0
    assert rows[9]["ring_lower"] == pytest.approx(50 * 9 / 18)
    assert all(row["loss"] > 0 for row in rows)


def kill_at(step, number):
    """A RunLog whose process gets a signal once a step is written."""

    def write(self, current, *arguments):
        original(self, current, *arguments)
        if current == step:
            os.kill(os.getpid(), number)

    original = RunLog.write
    return write


KILLED = """
import signal, sys
sys.path.insert(0, sys.argv[1])
from test_pretrain import kill_at
from iecl_fast.engine.logging import RunLog
from iecl_fast.cli import main
RunLog.write = kill_at(11, signal.SIGKILL)
main(sys.argv[2:])
"""


def test_killed_in_mid_epoch_and_resumed_is_the_uninterrupted_run(small_run, whole_run, tmp_path):
    """Step 11 is the fifth of the second epoch, the last checkpoint is of step 9: two rows of metrics are cut off."""
    arguments = small_run("run", "trainer.checkpoint_steps=3")
    command = [sys.executable, "-c", KILLED, os.path.dirname(__file__), *arguments]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = tmp_path / "run"
    assert load_checkpoint(folder / "checkpoints" / "last.ckpt")["step"] == 9
    assert read_metrics(folder / "metrics.csv")[-1]["step"] == 11
    assert not (folder / "result.json").exists()

    assert main(["pretrain", "--resume", str(folder)]) == 0
    assert_same_run(folder, whole_run)
    assert len(json.loads((folder / "environment.json").read_text())["resumed"]) == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_a_checkpoint_of_that_very_step(
    small_run, whole_run, tmp_path, monkeypatch, capsys, number, status
):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", kill_at(8, number))
        assert main(small_run("run")) == status
    message = capsys.readouterr().err
    assert f"stopped by {signal.Signals(number).name} after step 8 of 18" in message
    assert f"iecl-fast pretrain --resume {folder}" in message
    assert load_checkpoint(folder / "checkpoints" / "last.ckpt")["step"] == 8

    assert main(["pretrain", "--resume", str(folder)]) == 0
    assert_same_run(folder, whole_run)


def test_a_signal_while_the_untrained_encoder_is_measured(small_run, whole_run, tmp_path, monkeypatch, capsys):
    def measure(*_, **__):
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(run, "measure", measure)
        assert main(small_run("run")) == 130
    assert "--resume" in capsys.readouterr().err
    assert main(["pretrain", "--resume", str(tmp_path / "run")]) == 0
    assert_same_run(tmp_path / "run", whole_run)


def test_a_finished_run_is_only_reported(whole_run, capsys):
    before = {path: path.stat().st_mtime_ns for path in whole_run.rglob("*")}
    assert main(["pretrain", "--resume", str(whole_run)]) == 0
    assert "linear probe" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in whole_run.rglob("*")} == before


def test_other_values_do_not_resume_and_are_named(whole_run, capsys):
    assert main(["pretrain", "--resume", str(whole_run), "method.temperature=0.5", "--epochs", "9"]) == 2
    message = capsys.readouterr().err
    assert "method.temperature: the run has 0.2, asked for is 0.5" in message
    assert "trainer.epochs: the run has 3, asked for is 9" in message
    assert "encoder" not in message


def test_an_edited_config_file_does_not_resume_either(small_run, whole_run, tmp_path, capsys):
    folder = shutil.copytree(whole_run, tmp_path / "copy")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["method"]["temperature"] = 0.3
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["pretrain", "--resume", str(folder)]) == 2
    assert "method.temperature" in capsys.readouterr().err


def test_what_may_differ_resumes(small_run, whole_run, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", kill_at(8, signal.SIGINT))
        assert main(small_run("run")) == 130
    folder = folder.rename(tmp_path / "moved")
    assert main(["pretrain", "--resume", str(folder), "data.workers=1", "trainer.checkpoint_steps=5"]) == 0
    assert_same_run(folder, whole_run)


def test_an_existing_folder_is_not_overwritten(whole_run, tmp_path, small_run, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    assert main(small_run("mine")) == 2
    assert "is not overwritten" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]

    assert main(["pretrain", "--output", str(whole_run)]) == 2
    assert f"--resume {whole_run}" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_said(small_run, whole_run, tmp_path, capsys):
    folder = shutil.copytree(whole_run, tmp_path / "copy")
    (folder / "result.json").unlink()
    checkpoint = folder / "checkpoints" / "last.ckpt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    assert main(["pretrain", "--resume", str(folder)]) == 2
    message = capsys.readouterr().err
    assert "last.ckpt" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("damage", ["{", "null", "{}"])
def test_a_damaged_result_is_said(whole_run, tmp_path, capsys, damage):
    folder = shutil.copytree(whole_run, tmp_path / "copy")
    (folder / "result.json").write_text(damage)
    assert main(["pretrain", "--resume", str(folder)]) == 2
    assert "result.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["{", "[]", '{"resumed": 3}'])
def test_a_damaged_environment_is_said(whole_run, tmp_path, capsys, damage):
    folder = shutil.copytree(whole_run, tmp_path / "copy")
    (folder / "result.json").unlink()
    (folder / "environment.json").write_text(damage)
    assert main(["pretrain", "--resume", str(folder)]) == 2
    assert "environment.json is damaged" in capsys.readouterr().err


def test_a_data_set_of_another_size_is_said(whole_run, tmp_path, capsys):
    folder = shutil.copytree(whole_run, tmp_path / "copy")
    (folder / "result.json").unlink()
    checkpoint = folder / "checkpoints" / "last.ckpt"
    save_checkpoint(checkpoint, load_checkpoint(checkpoint) | {"samples": 50})
    assert main(["pretrain", "--resume", str(folder)]) == 2
    assert "the run saw 50 training images, digits now has 48" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"step": 19}, "step 19 of 18"),
        ({"faults": {}}, "does not fit Faults"),
        ({"method": {}}, "does not fit MoCo"),
        ({"optimizer": {"state": 3}}, "does not fit SGD"),
        ({"precision": {"scale": 1.0}, "rng": [3]}, "random generators are damaged"),
    ],
)
def test_parts_that_are_none_are_said(whole_run, tmp_path, capsys, part, words):
    folder = shutil.copytree(whole_run, tmp_path / "copy")
    (folder / "result.json").unlink()
    checkpoint = folder / "checkpoints" / "last.ckpt"
    save_checkpoint(checkpoint, load_checkpoint(checkpoint) | part)
    assert main(["pretrain", "--resume", str(folder)]) == 2
    message = capsys.readouterr().err
    assert words in message and "Traceback" not in message


def test_a_diverged_run_stops_and_keeps_its_last_checkpoint(small_run, tmp_path, capsys):
    assert main(small_run("run", "optimizer.lr=1e30", "trainer.checkpoint_steps=1")) == 1
    message = capsys.readouterr().err
    assert "diverged" in message
    assert "optimizer.lr" in message
    state = load_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert state["step"] < 18


def test_the_number_of_threads_is_the_configured_one_and_comes_back(small_run, monkeypatch):
    def note(*_, **__):
        seen.append(torch.get_num_threads())
        raise RunError("seen enough")

    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr(run, "measure", note)
    assert main(small_run("run", f"trainer.threads={before + 1}")) == 1
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_accumulated_batches_make_fewer_steps(small_run, tmp_path):
    assert main(small_run("run", "trainer.accumulate=2", "trainer.epochs=1")) == 0
    values = result(tmp_path / "run")
    assert values["steps"] == 3
    assert int(weights(tmp_path / "run")["queue.filled"]) == 32  # 3 steps of 16 keys fill the queue of 32


def test_more_accumulation_than_batches_is_refused(small_run, capsys):
    assert main(small_run("run", "trainer.accumulate=7")) == 2
    assert "trainer.accumulate=7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["ring.lower=[0,94]", "ring.upper=94.5"], "ring"),  # keeps none of 32 keys at the end
        (["ring.lower=[0,99]"], "ring"),
        (["ring=null", "method.num_keys=0"], "method: num_keys"),
        (["method.momentum=1.5"], "method: momentum"),
        (["data.limit=100000"], "data: limit"),
        (["data.limit=1"], "at least 2 images"),
        (["trainer.batch_size=1"], "trainer.batch_size: 1 is not allowed"),
        (["trainer.accelerator=cuda"], "trainer"),
    ],
)
def test_what_a_part_refuses(small_run, tmp_path, capsys, overrides, words):
    if "trainer.accelerator=cuda" in overrides and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main(small_run("run", *overrides)) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_adamw_and_bfloat16(small_run, tmp_path):
    overrides = ["optimizer.name=adamw", "optimizer.lr=1e-3", "trainer.precision=bf16-mixed", "trainer.epochs=1"]
    assert main(small_run("run", *overrides)) == 0
    assert weights(tmp_path / "run")["encoder.head.0.weight"].dtype == torch.float32


def test_the_progress_bar_has_loss_and_rate(small_run, capsys):
    assert main(small_run("run", "trainer.progress=true", "trainer.epochs=1")) == 0
    bar = capsys.readouterr().err
    assert "loss=" in bar
    assert "img/s" in bar
    assert "measuring the untrained encoder" in bar


def test_tensorboard_has_what_the_csv_has(whole_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(whole_run / "tensorboard"))
    events.Reload()
    rows = read_metrics(whole_run / "metrics.csv")
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([row["loss"] for row in rows], rel=1e-6)
    assert {"learning_rate", "images_per_second", "ring_lower"} <= set(events.Tags()["scalars"])


def test_two_processes_train_together(small_run, tmp_path):
    arguments = small_run("run", "trainer.devices=2", "trainer.accelerator=cpu", "trainer.epochs=1")
    command = [sys.executable, "-m", "iecl_fast.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("linear probe") == 1
    state = load_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert state["step"] == 6
    assert int(state["method"]["queue.filled"]) == 32
    assert len(state["rng"]) == 2
