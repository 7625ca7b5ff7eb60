"""Every Triton kernel of Ring, in every configuration it can be launched in, compiled for GPUs that are not there."""

import re
from functools import cache

import pytest
import torch

pytest.importorskip("triton")

from iecl_fast.ring import plans, triton_gradients, triton_info_nce, triton_select
from ring.ahead_of_time import compile_for, recorded_launches

SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that a block may have
MATRIX_INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
N, K = 256, 65536
# One for each power of two that a tile may have.
CHANNELS = (64, 128, 256)

compiled = cache(compile_for)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


def launch_plans(dtype, channels, key_major=True, exclude=None):
    """Forward and gradients by plan C, with selection in Triton."""
    kernels = plans.Kernels(
        triton_select.select,
        triton_select.select_candidates,
        triton_select.compact,
        triton_select.draw,
        triton_gradients.sample_query_gradient,
        triton_gradients.sample_keys_gradient,
    )
    query = torch.empty(N, channels, dtype=dtype)
    keys = torch.empty(K, channels, dtype=dtype) if key_major else torch.empty(channels, K, dtype=dtype).T
    temperature = torch.tensor(0.07, dtype=torch.float64)
    ranks = [58983, 64881, 58982, 64880]
    triton_info_nce.write_similarities(query, keys, torch.empty(N, K), plans.precision(dtype))
    for with_gradient in (False, True):
        loss, log_denominator, _ = plans.info_nce(
            query, query, keys, temperature, ranks, exclude, with_gradient, kernels
        )
    plans.info_nce_keys_gradient(query, keys, temperature, ranks, exclude, log_denominator, loss, kernels)
    values, indices = plans.sample(query, keys, ranks, exclude, None, True, kernels)
    kernels.sample_query_gradient(values, indices.zero_(), keys)
    kernels.sample_keys_gradient(values[:, :2].contiguous(), indices[:, :2], query, K)


def launches_of(monkeypatch, dtype, precision, **options):
    """All launches that differ, for all numbers of channels."""
    monkeypatch.setattr(plans, "precision", lambda dtype: precision)
    monkeypatch.setattr(torch, "mm", lambda *_, out: out)  # not what is tested here, and long on a CPU
    launches = []
    for channels in CHANNELS:
        launches += recorded_launches(monkeypatch, lambda channels=channels: launch_plans(dtype, channels, **options))
    return list(dict.fromkeys(launches))


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float16, "ieee"), (torch.bfloat16, "ieee"), (torch.float32, "ieee"), (torch.float32, "tf32")],
    ids=str,
)
def test_every_configuration(monkeypatch, dtype, precision, capability):
    launches = launches_of(monkeypatch, dtype, precision)
    assert {launch.kernel.__name__ for launch in launches} >= {"_weigh_kernel", "_combine_kernel", "_select_kernel"}
    faults = []
    for launch in launches:
        code = compiled(launch, capability)
        if code.stack > 0:
            faults.append(f"{launch} spills: {code.stack} bytes of stack, {code.registers} registers")
        if code.shared > SHARED[capability]:
            faults.append(f"{launch} takes {code.shared} bytes of shared memory")
        in_matrix_unit = launch.kernel.__name__ in ("_product_kernel", "_weigh_kernel") and (
            dtype != torch.float32 and dict(launch.constants).get("WITH_GRADIENT", True)
        )
        if in_matrix_unit and MATRIX_INSTRUCTION[capability] not in code.ptx:
            faults.append(f"{launch} has no {MATRIX_INSTRUCTION[capability]}")
    assert not faults, "\n".join(faults)


def test_other_layouts_and_excluded_keys(monkeypatch):
    """On one architecture: they change addresses and masks alone."""
    exclude = torch.zeros(N, dtype=torch.int64)
    launches = launches_of(monkeypatch, torch.bfloat16, "ieee", key_major=False, exclude=exclude)
    faults = [str(launch) for launch in launches if compiled(launch, 90).stack > 0]
    assert not faults


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_offsets_have_64_bits(monkeypatch, dtype):
    """No product of 32-bit numbers is widened afterwards: strides are multiplied in 64 bits or as 32 x 32 to 64."""
    launches = launches_of(monkeypatch, dtype, "ieee")
    for launch in launches:
        ptx = compiled(launch, 90).ptx
        narrow = set(re.findall(r"(?:mul\.lo|mad\.lo)\.s32\s+(%r\d+)", ptx))
        widened = set(re.findall(r"cvt\.s64\.s32\s+%rd\d+,\s*(%r\d+)", ptx))
        widened |= set(re.findall(r"mul\.wide\.s32\s+%rd\d+,\s*(%r\d+)", ptx))
        assert not narrow & widened, f"{launch}: {sorted(narrow & widened)}"
