"""Of two processes one fails, is killed or gets a signal: both end, soon, with one sentence; the checkpoint loads."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from iecl_fast.cli import main
from iecl_fast.engine import ending
from iecl_fast.engine.ending import claim_end, lost_ranks
from iecl_fast.engine.errors import RunError
from iecl_fast.engine.logging import read_metrics

# By case: exit status, pattern of the only sentence (None: there is none), step of the checkpoint.
EXPECTED = {
    "full disk": (1, "last.ckpt: File too large; the checkpoint of step 2 is kept", 2),
    "unreadable": (1, "an image cannot be read: 5.png: ", 2),
    "worker killed": (1, "a process that loads images has ended: ", 2),
    "first killed": (-9, None, 2),  # the shell says it
    "second killed": (1, "process 1 of the run was ended by SIGKILL|another process of the run has ended", 2),
    "second terminated": (143, "stopped by SIGTERM after step 3 of 4; the checkpoint of step 3 is kept", 3),
    "all terminated": (143, "stopped by SIGTERM after step 3 of 4; the checkpoint of step 3 is kept", 3),
    "interrupted": (130, "stopped by SIGINT after step 3 of 4; the checkpoint of step 3 is kept", 3),
    "interrupted measuring": (130, "stopped by SIGINT; go on with: iecl-fast pretrain --resume", None),
    "interrupted writing": (130, "stopped by SIGINT; go on with: iecl-fast pretrain --resume", None),
}
OF_FABRIC = ("Initializing distributed", "distributed_backend", "All distributed processes", "-----")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of all cases, and what came of each."""
    folder, here = tmp_path_factory.mktemp("ended"), Path(__file__).parent
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    command = [sys.executable, str(here / "ended_runs.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


@pytest.mark.parametrize("case", EXPECTED)
def test_it_ends_with_one_sentence_and_nothing_is_left(runs, case):
    status, pattern, step = EXPECTED[case]
    came = runs[1][case]
    lines = [line for line in came["lines"] if line and not line.startswith(OF_FABRIC)]
    assert came["status"] == status, lines
    assert len(lines) == (pattern is not None), lines
    if pattern is not None:
        assert lines[0].startswith("iecl-fast: ") and re.search(pattern, lines[0])
    assert (came["step"], came["left"], came["half_written"]) == (step, 0, False)
    assert came["seconds"] < 10


def test_a_run_whose_second_process_was_killed_goes_on_without_it(runs):
    folder = runs[0] / "second killed"
    assert main(["pretrain", "--resume", str(folder), "trainer.devices=1", "data.workers=0"]) == 0
    assert [row["step"] for row in read_metrics(folder / "metrics.csv")] == [1, 2, 3, 4]


def test_of_several_that_end_the_first_one_speaks(monkeypatch):
    """Two ranks of one store: the second one's status is that of the first one, and it is silent."""
    dist = ending.dist
    store = dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    assert claim_end(143) == (143, True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    assert claim_end(1) == (143, False)


def test_one_process_speaks_for_itself():
    assert claim_end(2) == (2, True)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("[/third_party/gloo/transport/pair.cc:1] Connection closed by peer"), ending.dist.DistError("gone")],
)
def test_a_lost_process_is_a_run_error(error):
    with pytest.raises(RunError, match="another process of the run has ended"), lost_ranks():
        raise error


def test_another_error_is_left_as_it_is():
    with pytest.raises(RuntimeError, match="shapes"), lost_ranks():
        raise RuntimeError("shapes do not match")
