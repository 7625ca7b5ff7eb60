"""``--dry-run``: what it prints is what a run does, and it does nothing."""

import json

import pytest
import yaml

from iecl_fast.cli import main
from iecl_fast.engine.logging import read_metrics


@pytest.fixture
def plan(capsys):
    def run(arguments):
        assert main([*arguments, "--dry-run"]) == 0
        return yaml.safe_load(capsys.readouterr().out)

    return run


def test_it_says_what_the_run_did(plan, small_run, whole_run, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    planned = plan(small_run("run"))
    assert sorted(tmp_path.rglob("*")) == before  # nothing is written
    effective, rows = planned["effective"], read_metrics(whole_run / "metrics.csv")
    assert (
        effective["steps"]["total"] == json.loads((whole_run / "result.json").read_text())["steps"] == rows[-1]["step"]
    )
    assert effective["learning_rate"]["first"] == rows[0]["learning_rate"]
    assert effective["learning_rate"]["last"] == rows[-1]["learning_rate"]
    ring = effective["ring"]
    assert (ring["lower"], ring["anneal_steps"], ring["candidates"]) == ([0.0, 50.0], 18, 32)
    assert ring["kept"] == [31, 15]  # ranks 0 and 16 to ceil(95 % of 32) = 31
    assert set(effective["received_mib_per_step"].values()) == {0.0}
    saved = yaml.safe_load((whole_run / "config.yaml").read_text())
    assert planned["config"] | {"output": None} == saved | {"output": None}


def test_several_machines_can_be_planned_on_one(plan, small_run):
    overrides = ["trainer.devices=2", "trainer.num_nodes=2", "trainer.accumulate=3", "trainer.accelerator=cuda"]
    effective = plan(small_run("run", *overrides))["effective"]
    assert effective["processes"] == {
        "world_size": 4,
        "nodes": 2,
        "devices_per_node": 2,
        "started_by": "torchrun",
        "accelerator": "cuda",
        "precision": "32-true",
    }
    assert effective["batch"] == {"all_devices": 8, "each_device": 2, "accumulate": 3, "images_per_step": 24}
    assert effective["steps"] == {"images": 48, "left_out_each_epoch": 0, "per_epoch": 2, "epochs": 3, "total": 6}
    trained = effective["parameters"]["trained"]
    assert effective["received_mib_per_step"]["gradients"] == round(trained * 4 * 2 * 3 / 4 / 2**20, 3)


def test_the_steps_do_not_depend_on_the_number_of_devices(plan, small_run):
    """Nor does what is counted in epochs: warm-up and annealing."""
    overrides = ["schedule.warmup_epochs=0.5", "ring.anneal_epochs=2", "trainer.accumulate=2"]
    plans = [plan(small_run("run", f"trainer.devices={devices}", *overrides))["effective"] for devices in (1, 2, 4)]
    for name in ("steps", "learning_rate", "ring", "parameters"):
        assert plans[0][name] == plans[1][name] == plans[2][name]
    assert plans[0]["learning_rate"]["warmup_steps"] == 2  # half of 3, rounded to even
    assert plans[0]["ring"]["anneal_steps"] == 6


def test_a_ring_of_simclr_is_taken_from_all_devices_images(plan, small_run, capsys):
    """Each of 4 devices has 2 images, whose ring would be empty; all have 8."""
    ring = ["ring.lower=[0,70]", "ring.upper=80"]
    arguments = ["pretrain", "--method", "simclr", *small_run("run")[1:], *ring, "trainer.devices=4"]
    arguments = [word for word in arguments if "num_keys" not in word]
    effective = plan(arguments)["effective"]
    assert effective["ring"]["candidates"] == 14
    assert effective["ring"]["kept"] == [12, 2]


def test_what_a_sharded_bank_sends_is_not_known_beforehand(plan, small_run):
    words = [word for word in small_run("run") if "num_keys" not in word]
    for value, known in (("false", True), ("true", False)):
        arguments = [words[0], "--method", "ir", *words[1:], "trainer.devices=2", f"method.sharded={value}"]
        traffic = plan(arguments)["effective"]["received_mib_per_step"]
        assert (traffic["keys"] is not None) == known and traffic["gradients"] > 0


def test_it_refuses_what_a_run_refuses(small_run, whole_run, capsys):
    for arguments, words in (
        (small_run("run", "trainer.devices=3"), "a multiple of the number of devices, 3"),
        (small_run("run", "trainer.accumulate=7"), "trainer.accumulate=7"),
        (["pretrain", "--output", str(whole_run)], "is not overwritten"),
        (["pretrain", "--resume", str(whole_run), "method.temperature=0.5"], "method.temperature: the run has 0.2"),
    ):
        assert main([*arguments, "--dry-run"]) == 2
        output = capsys.readouterr()
        assert words in output.err and not output.out


def test_a_resumed_run_can_be_planned_on_other_devices(plan, whole_run):
    effective = plan(["pretrain", "--resume", str(whole_run), "trainer.devices=2"])["effective"]
    assert effective["output"] == str(whole_run)
    assert effective["batch"]["each_device"] == 4


def test_under_torchrun_the_first_process_says_it(small_run, monkeypatch, capsys):
    sizes = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
    for name, value in sizes.items():
        monkeypatch.setenv(name, value)
    for rank in ("2", "0"):
        monkeypatch.setenv("RANK", rank)
        assert main([*small_run("run"), "--dry-run"]) == 0
        output = capsys.readouterr().out
        assert bool(output) == (rank == "0")
    processes = yaml.safe_load(output)["effective"]["processes"]
    assert (processes["world_size"], processes["nodes"], processes["started_by"]) == (4, 2, "torchrun")
