"""Memory at its peak, forward and backward, against the chain of PyTorch modules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEASURE = """
import sys
from bench.measure import peak_memory
from bench.saib import peers
import torch

torch.set_num_threads(1)
case = peers.Case(n=int(sys.argv[2]), channels=sys.argv[3])
print(peak_memory(peers.with_gradient(peers.FORMS[sys.argv[1]], case)))
"""


def peak(form: str, n: int, channels: str) -> float:
    # Freed memory goes back to the system at once, or what lies around in the heap would be counted.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    arguments = [sys.executable, "-c", MEASURE, form, str(n), channels]
    run = subprocess.run(arguments, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return float(run.stdout)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux' /proc")
@pytest.mark.parametrize(("n", "channels"), [(64, "batch"), (256, "batch"), (256, "patch")])
def test_takes_at_most_six_tenths_of_the_chains_memory(n, channels):
    ours, chain = peak("iecl_fast", n, channels), peak("chain", n, channels)
    assert 0 < ours <= 0.6 * chain, (ours, chain)
