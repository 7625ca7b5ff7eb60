"""Whole runs with a memory bank spread over processes."""

import signal
import subprocess
import sys
import time

import torch
from test_bank_runs import arguments

from iecl_fast.cli import main
from iecl_fast.engine.checkpoint import load_checkpoint

# Batch norm over four images of a pixel or so makes large gradients.
TWO = ["method.sharded=true", "trainer.devices=2", "trainer.accelerator=cpu", "optimizer.lr=0.001"]


def wait_for_rows(process, metrics, count):
    until = time.monotonic() + 240
    while not (metrics.exists() and metrics.read_text().count("\n") > count):
        assert process.poll() is None and time.monotonic() < until, process.stderr.read()
        time.sleep(0.05)


def test_stopped_on_two_processes_and_resumed_on_one(tmp_path):
    """The checkpoint holds the whole bank, whatever part of it each process held."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "iecl_fast.cli", *arguments(folder, "cmc", *TWO)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_rows(process, folder / "metrics.csv", 7)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 143, errors
    halted = load_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert 7 <= halted["step"] < 18 and len(halted["rng"]) == 2

    assert main(["pretrain", "--resume", str(folder), "trainer.devices=1", "method.sharded=false"]) == 0
    finished = load_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert finished["step"] == 18
    for bank in ("luminance_contrast.bank.keys", "chroma_contrast.bank.keys"):
        before, after = halted["method"][bank], finished["method"][bank]
        assert before.shape == after.shape == (48, 8) and not torch.equal(before, after)
        torch.testing.assert_close(before.norm(dim=1), torch.ones(48))
