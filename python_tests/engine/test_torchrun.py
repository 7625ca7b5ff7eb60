"""torchrun itself: two processes train, a signal to torchrun stops both with a checkpoint, one process goes on."""

import re
import signal
import subprocess
import sys
import time

from iecl_fast.cli import main
from iecl_fast.engine.checkpoint import load_checkpoint
from iecl_fast.engine.logging import read_metrics
from small_runs import SMALL_RUN

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_stopped_and_resumed_without_it(tmp_path, capsys):
    folder, metrics = tmp_path / "run", tmp_path / "run" / "metrics.csv"
    run = ["pretrain", "--output", str(folder), *SMALL_RUN, "trainer.epochs=12"]
    with subprocess.Popen([*TORCHRUN, "-m", "iecl_fast.cli", *run], stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 300
        while not (metrics.exists() and len(read_metrics(metrics)) >= 3):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=300)[1]
    assert process.returncode != 0
    state = load_checkpoint(folder / "checkpoints" / "last.ckpt")
    step = state["step"]
    assert re.search(rf"stopped by SIGTERM after step {step} of 72", errors), errors
    assert "distributed_backend" not in errors  # Fabric's banner
    assert 3 <= step < 72 and len(state["rng"]) == 2
    assert read_metrics(metrics)[-1]["step"] == step

    assert main(["pretrain", "--resume", str(folder)]) == 0
    assert "linear probe" in capsys.readouterr().out
    assert [row["step"] for row in read_metrics(metrics)] == list(range(1, 73))
