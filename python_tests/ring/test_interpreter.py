"""Runs the tests of Triton kernels in its interpreter, which has to be chosen before Triton is imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
FILES = sorted(path.name for path in HERE.glob("interpreted_*.py"))


@pytest.mark.parametrize("file", FILES)
def test_interpreted(file):
    """All tests of a file, in a pytest process of their own; none may be skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    summary = run.stdout.strip().splitlines()[-1]
    print(summary)
    assert re.search(r"\b[1-9]\d* passed", summary) and "skipped" not in summary, run.stdout
