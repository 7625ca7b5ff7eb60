"""Whole runs of the methods with a memory bank: interrupted, resumed, evaluated."""

import json
import signal

import pytest
import torch

from iecl_fast.cli import main
from iecl_fast.engine.checkpoint import load_checkpoint
from iecl_fast.engine.logging import RunLog, read_metrics
from test_pretrain import assert_same_run, kill_at

METHOD_OPTIONS = {
    "ir": ["method.num_samples=64", "ring.lower=[0,50]", "ring.upper=95"],
    "cmc": ["method.num_samples=64", "method.loss=nce", "ring.lower=[0,50]", "ring.upper=95"],
    "la": ["method.warm_start=1", "method.num_clusters=8", "method.num_clusterings=2", "method.num_neighbors=20"],
}


def arguments(folder, method, *overrides):
    small = ["encoder.width=2", "trainer.threads=1", "data.limit=48", "evaluate.linear_iterations=10"]
    trainer = ["trainer.epochs=3", "trainer.batch_size=8", "trainer.log_steps=1", "trainer.progress=false"]
    run = ["pretrain", "--method", method, "--output", str(folder), "method.dim=8"]
    return [*run, *METHOD_OPTIONS[method], *small, *trainer, *overrides]


@pytest.mark.parametrize("method", METHOD_OPTIONS)
def test_stopped_in_mid_anneal_and_resumed_is_the_uninterrupted_run(method, tmp_path, monkeypatch, capsys):
    whole, halted = tmp_path / "whole", tmp_path / "halted"
    assert main(arguments(whole, method)) == 0
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", kill_at(8, signal.SIGTERM))
        assert main(arguments(halted, method)) == 143
    assert main(["pretrain", "--resume", str(halted)]) == 0
    assert_same_run(halted, whole)

    rows = read_metrics(whole / "metrics.csv")
    assert all(-1 < row["positive_similarity"] < 1 for row in rows)
    if method == "la":
        assert [row["close_share"] > 0 for row in rows] == [False] * 6 + [True] * 12  # one epoch of warm start
    else:
        assert rows[9]["ring_lower"] == pytest.approx(50 * 9 / 18)
    if method == "cmc":
        assert rows[0]["loss"] == pytest.approx(rows[0]["contrast_luminance"] + rows[0]["contrast_chroma"], rel=1e-6)

    capsys.readouterr()
    assert main(["evaluate", "knn", "--checkpoint", str(whole), "--output", str(tmp_path / "knn")]) == 0
    values = json.loads((whole / "result.json").read_text())
    assert json.loads((tmp_path / "knn" / "result.json").read_text())["knn_top1"] == values["knn_top1"]


def test_the_bank_has_an_entry_for_each_image(tmp_path):
    assert main(arguments(tmp_path / "run", "ir", "trainer.epochs=1", "trainer.accumulate=3")) == 0
    state = load_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")["method"]
    assert state["contrast.bank.keys"].shape == (48, 8) and state["step"] == 2
    torch.testing.assert_close(state["contrast.bank.keys"].norm(dim=1), torch.ones(48))


@pytest.mark.parametrize(
    ("method", "overrides", "words"),
    [
        ("ir", ["ring.lower=[0,99]", "ring.upper=99.5"], "ring"),  # keeps none of the 47 others at the end
        ("la", ["ring.upper=99"], "ring: la takes no ring; write ring=null"),
        ("la", ["method.num_clusters=49"], "method: num_clusters must lie in 1..48"),
        ("cmc", ["encoder.width=3"], "encoder: width must be even"),
        ("ir", ["method.num_images=9"], "there is no key method.num_images"),
    ],
)
def test_what_a_part_refuses(method, overrides, words, tmp_path, capsys):
    assert main(arguments(tmp_path / "run", method, *overrides)) == 2
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1
    assert not (tmp_path / "run").exists()
