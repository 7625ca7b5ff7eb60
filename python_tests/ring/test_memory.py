"""Memory that the kernels take, and offsets that 32 bits do not hold."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from iecl_fast import ring_info_nce, ring_sample

MEASURE = """
import sys, torch, torch.nn.functional as F
from iecl_fast import ring_info_nce, ring_sample

def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) / 1024

torch.set_num_threads(2)
k, case = int(sys.argv[1]), sys.argv[2]
query = F.normalize(torch.randn(256, 128), dim=1).requires_grad_(not case.startswith("draw"))
exclude = torch.arange(256) if case == "draw from the others" else None
keys = torch.empty(k, 128)
for part in keys.split(65536):
    part.copy_(F.normalize(torch.randn_like(part), dim=1))
    if case == "constant":
        part.copy_(keys[:1].expand_as(part))

def run(keys):
    if case.startswith("draw"):
        return ring_sample(query, keys, 90, 99, num_samples=4096, exclude=exclude)
    ring_info_nce(query, query.detach().flip(0), keys, lower=90, upper=99).backward()

run(keys[:6000])  # what the first call sets up for good
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # resets the peak
result = run(keys)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux' /proc")
@pytest.mark.parametrize(
    ("num_keys", "case"), [(65536, "unit"), (65536, "constant"), (1_000_000, "unit"), (1_281_167, "unit")]
)
def test_loss_takes_at_most_32_mib(num_keys, case):
    """Also for a key for each image of ImageNet, where the similarities alone would be 1.2 GiB."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(num_keys), case], check=True, capture_output=True, text=True
    )
    assert 0 < float(run.stdout) <= 32


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux' /proc")
@pytest.mark.parametrize("case", ["draw", "draw from the others"])
def test_draws_take_at_most_32_mib_beyond_what_they_return(case):
    """Also with a key excluded for each query, as in a memory bank."""
    run = subprocess.run([sys.executable, "-c", MEASURE, "1281167", case], check=True, capture_output=True, text=True)
    positions_and_similarities = 256 * 4096 * (8 + 4) / 2**20
    assert 0 < float(run.stdout) <= 32 + positions_and_similarities


def test_offsets_beyond_32_bits():
    """Rows 2^23 elements apart: only the pages that hold a row exist."""
    stride, num_keys = 2**23, 300
    try:
        storage = torch.empty(stride * num_keys, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("no address space for 5 GB")
    keys = storage.as_strided((num_keys, 8), (stride, 1))
    keys.copy_(torch.randn(num_keys, 8))
    assert (num_keys - 1) * stride > 2**31
    query = torch.randn(3, 8).half().requires_grad_()
    compact = keys.clone()
    for stored in (keys, compact):
        assert torch.equal(ring_sample(query, stored, 0, 100), ring_sample(query, compact, 0, 100))
    gradients = [
        torch.autograd.grad(ring_info_nce(query, query, stored, lower=20, upper=90), query)[0]
        for stored in (keys, compact)
    ]
    assert torch.equal(*gradients)
