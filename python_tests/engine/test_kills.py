"""Whenever a run is killed, its newest complete checkpoint loads, and what it ends with is as if nothing had been."""

import json
import os
import subprocess
import sys
from pathlib import Path

from iecl_fast.engine.checkpoint import is_leftover
from test_pretrain import assert_same_run

KILLS = 24


def test_killed_many_times_the_run_is_the_uninterrupted_one(tmp_path):
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), *sys.path])
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(here / "killed_runs.py"), str(tmp_path), str(KILLS), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=os.environ | one_thread)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["kills"] == KILLS
    assert figures["half_written"] >= 4
    assert len(set(figures["steps"])) > 4  # it got on between the kills
    for run in map(Path, figures["runs"]):
        assert_same_run(run, tmp_path / "whole")
        assert not any(map(is_leftover, run.rglob(".*")))
    assert "Traceback" not in (tmp_path / "log.txt").read_text()
