"""Sweeps: a table of several recipes and seeds, taken up where they were left, nothing overwritten."""

import json
import shutil
import signal
import statistics

import pytest
import yaml

from iecl_fast.cli import main
from iecl_fast.engine import sweep as module
from iecl_fast.engine.config import override, read_recipe
from iecl_fast.engine.errors import RunError, UsageError
from iecl_fast.engine.logging import RunLog
from iecl_fast.engine.sweep import format_table
from small_runs import SMALL_RUN
from test_pretrain import kill_at


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Two small recipes that differ in the temperature."""
    folder = tmp_path_factory.mktemp("configs")
    for name, temperature in (("warm", 0.5), ("cold", 0.1)):
        overrides = (*SMALL_RUN[2:], f"method.temperature={temperature}", "trainer.epochs=1")
        mapping = override(read_recipe("digits_moco"), overrides)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(mapping))
    return [str(folder / f"{name}.yaml") for name in ("warm", "cold")]


@pytest.fixture(scope="module")
def done(tmp_path_factory, configs):
    folder = tmp_path_factory.mktemp("sweep") / "out"
    assert main(["sweep", *configs, "--seeds", "2", "--output", str(folder)]) == 0
    return folder


def results(folder):
    return {str(path.relative_to(folder)): json.loads(path.read_text()) for path in folder.rglob("result.json")}


def test_every_run_and_the_summary(done):
    runs = results(done)
    assert set(runs) == {f"{name}/seed{seed}/result.json" for name in ("warm", "cold") for seed in (0, 1)}
    assert runs["warm/seed0/result.json"]["seed"] == 0 and runs["warm/seed1/result.json"]["seed"] == 1
    config = yaml.safe_load((done / "cold" / "seed1" / "config.yaml").read_text())
    assert config["method"]["temperature"] == 0.1
    summary = json.loads((done / "summary.json").read_text())
    for name in ("warm", "cold"):
        expected = [runs[f"{name}/seed{seed}/result.json"]["linear_top1"] for seed in (0, 1)]
        assert summary[name]["linear_top1"] == expected
    assert (done / "curves.png").stat().st_size > 10_000


def test_called_again_it_only_reads(done, configs, capsys):
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*") if path.parent != done}
    assert main(["sweep", *configs, "--seeds", "2", "--output", str(done)]) == 0
    assert {path: path.stat().st_mtime_ns for path in done.rglob("*") if path.parent != done} == before
    table = capsys.readouterr().out.splitlines()
    values = [100 * results(done)[f"cold/seed{seed}/result.json"]["knn_top1"] for seed in (0, 1)]
    assert f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f} %" in table[2]
    assert table[2].startswith("cold") and table[1].startswith("warm")


def test_other_settings_in_the_same_folder_are_refused(done, configs, capsys):
    assert main(["sweep", *configs, "--seeds", "2", "--output", str(done), "method.momentum=0.5"]) == 2
    assert "method.momentum: the run has 0.99, asked for is 0.5" in capsys.readouterr().err


def test_more_seeds_add_runs(done, configs, tmp_path, monkeypatch):
    """Without training: a stand-in notes what it is asked for."""
    asked = []

    def stand_in(config, resume):
        asked.append((config.seed, resume is not None))
        return None, dict.fromkeys(module.FIGURES, 0.5)

    monkeypatch.setattr(module, "pretrain", stand_in)
    monkeypatch.setattr(module, "write_json", lambda *_: None)
    monkeypatch.setattr(module, "draw_comparison", lambda *_: None)
    module.sweep(configs[:1], seeds=3, output=done)
    assert asked == [(0, True), (1, True), (2, False)]


def test_stopped_in_the_middle_and_taken_up(configs, done, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", kill_at(3, signal.SIGINT))
        assert main(["sweep", *configs, "--seeds", "1", "--output", str(folder)]) == 130
    assert "stopped by SIGINT after step 3" in capsys.readouterr().err
    assert main(["sweep", *configs, "--seeds", "1", "--output", str(folder)]) == 0
    for name, result in results(folder).items():
        reference = results(done)[name]
        assert {k: v for k, v in result.items() if k != "seconds"} == {
            k: v for k, v in reference.items() if k != "seconds"
        }


def test_a_damaged_run_is_said_before_any_training(done, configs, tmp_path, monkeypatch, capsys):
    copy = shutil.copytree(done, tmp_path / "out")
    (copy / "cold" / "seed1" / "checkpoints" / "last.ckpt").write_bytes(b"cut")
    monkeypatch.setattr(module, "pretrain", None)
    assert main(["sweep", *configs, "--seeds", "3", "--output", str(copy)]) == 2
    assert "cold/seed1/checkpoints/last.ckpt cannot be read as a checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [RunError, UsageError])
def test_a_run_that_fails_does_not_stop_the_others(configs, tmp_path, monkeypatch, capsys, kind):
    def stand_in(config, resume):
        if config.seed == 0:
            raise kind("the loss is nan")
        return None, dict.fromkeys(module.FIGURES, 0.25)

    monkeypatch.setattr(module, "pretrain", stand_in)
    assert main(["sweep", configs[0], "--seeds", "2", "--output", str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert "25.0 %" in output.out
    assert f"1 runs failed:\n{tmp_path}/warm/seed0: the loss is nan" in output.err


def test_a_folder_of_something_else_is_left_alone(configs, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("x")
    assert main(["sweep", *configs, "--output", str(tmp_path)]) == 2
    assert "is no sweep's: name another folder" in capsys.readouterr().err
    assert main(["sweep", *configs, "--output", str(tmp_path / "thesis.txt")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_table():
    figures = {name: [0.5, 0.7] for name in module.FIGURES} | {"seconds": [10.0, 12.0]}
    lines = format_table({"a": figures, "none": {name: [] for name in module.FIGURES}}).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "60.0 ± 14.1 %" in lines[1] and "11.0 ± 1.4" in lines[1]
    assert lines[2].split() == ["none", "0", "-", "-", "-", "-", "-"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digits", "--seeds", "0"], "--seeds: 0 is not allowed"),
        (["digits", "digits"], "two configurations are named digits"),
        (["digts"], "did you mean digits?"),
        (["trainer.epochs=3"], "name at least one recipe"),
        (["digits", "trainer.devices=2"], "trainer.devices: 2 in digits is not allowed in a sweep"),
        (["imagenet_moco_v2", "--data", "digits"], "trainer.devices: auto"),
        (["digits", "method.tempreture=1"], "did you mean method.temperature?"),
        ([], "required: CONFIG"),
    ],
)
def test_usage_errors(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_is_no_work_for_torchrun(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    assert main(["sweep", "digits"]) == 2
    assert "start it without torchrun" in capsys.readouterr().err
