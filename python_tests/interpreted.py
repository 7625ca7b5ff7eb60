"""Tests of Triton kernels in its interpreter, which has to be chosen before Triton is imported: in another process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def assert_passes_in_interpreter(path: Path) -> None:
    """All tests of the file ``path`` (whose name is not one that pytest collects) pass; none is skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parent.parent
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    summary = run.stdout.strip().splitlines()[-1]
    assert re.search(r"\b[1-9]\d* passed", summary) and "skipped" not in summary, run.stdout


def only_in_interpreter() -> None:
    """At the top of such a file: it is of no use elsewhere."""
    import triton

    if not triton.knobs.runtime.interpret:
        pytest.exit("run this file with TRITON_INTERPRET=1, as assert_passes_in_interpreter does", returncode=4)
