"""Ring's schedules as a run has them: given in epochs, in several shapes, and resumed."""

import signal
import subprocess
import sys

import pytest
import torch

from iecl_fast.cli import main
from iecl_fast.engine import build
from iecl_fast.engine.checkpoint import load_checkpoint
from iecl_fast.engine.config import resolve
from iecl_fast.engine.logging import RunLog, read_metrics
from iecl_fast.ring import AdaptiveRingSchedule
from test_pretrain import assert_same_run, kill_at


def schedule_of(ring, total_steps=600, epochs=200):
    groups = {"method": {"num_keys": 100}, "trainer": {"epochs": epochs}, "encoder": {"width": 2}}
    config = resolve({"ring": ring, **groups})
    return build.method(config, total_steps=total_steps, batch_size=8, num_images=1000).ring


def test_epochs_become_optimiser_steps():
    schedule = schedule_of({"lower": [0, 90], "anneal_epochs": 100})
    assert (schedule.steps, schedule(150), schedule(300)) == (300, (45, 99), (90, 99))
    assert schedule_of({"anneal": 0.25}).steps == 150
    assert schedule_of({"anneal": 0.25, "anneal_epochs": 0.1}).steps == 1  # 0.3 steps of 3 an epoch


def test_shapes_and_lesions():
    cosine = schedule_of({"lower": [0, 90], "shape": "cosine"})
    assert cosine(300)[0] == pytest.approx(45) and cosine(100)[0] < 15
    step = schedule_of({"lower": [0, 90], "shape": "step", "stages": 2})
    assert [step(at)[0] for at in (299, 300, 600)] == [0, 45, 90]
    assert isinstance(schedule_of({"shape": "adaptive"}), AdaptiveRingSchedule)
    assert schedule_of({"lower": 90})(0) == (90, 99)  # no annealing
    assert schedule_of({"lower": [0, 90], "upper": 100})(600) == (90, 100)  # the ball


def test_epochs_under_accumulation(small_run, tmp_path):
    """Six batches an epoch, two of them a step: the ring is closed after the three steps of the first epoch."""
    assert main(small_run("run", "trainer.accumulate=2", "ring.anneal_epochs=1", "trainer.epochs=2")) == 0
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert [row["ring_lower"] for row in rows] == pytest.approx([0, 50 / 3, 100 / 3, 50, 50, 50])


def test_an_adaptive_ring_resumes_in_the_middle_of_its_way(small_run, tmp_path, monkeypatch):
    overrides = ["ring.shape=adaptive", "optimizer.lr=0.3"]
    assert main(small_run("whole", *overrides)) == 0
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", kill_at(8, signal.SIGTERM))
        assert main(small_run("halted", *overrides)) == 143
    assert main(["pretrain", "--resume", str(tmp_path / "halted")]) == 0
    assert_same_run(tmp_path / "halted", tmp_path / "whole")

    lowers = [row["ring_lower"] for row in read_metrics(tmp_path / "whole" / "metrics.csv")]
    assert lowers[0] == 0 < lowers[-1] < 50
    parts = load_checkpoint(tmp_path / "whole" / "checkpoints" / "last.ckpt")["method"]["ring.parts"]
    assert 0 < parts < 18  # it has waited, too


def test_ranks_close_an_adaptive_ring_together(small_run, tmp_path):
    """Their losses differ; the schedule sees the mean. Rank 1 would wait for ever in a collective of another shape."""
    overrides = ["trainer.devices=2", "trainer.accelerator=cpu", "trainer.epochs=1", "ring.shape=adaptive"]
    command = [sys.executable, "-m", "iecl_fast.cli", *small_run("run", *overrides)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    state = load_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")["method"]
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    again = AdaptiveRingSchedule(lower=(0, 50), upper=95, steps=6)
    for row in rows:
        assert row["ring_lower"] == again(0)[0]
        again.observe(row["loss"])
    torch.testing.assert_close(state["ring.quick"], again.quick, rtol=1e-6, atol=0)
    assert state["ring.parts"] == again.parts
