"""Every Triton kernel of Ring, in every configuration it can be launched in, compiled for GPUs that are not there."""

import re

import pytest
import torch

pytest.importorskip("triton")

from ahead_of_time import MATRIX_INSTRUCTION, SHARED, compile_for
from launched_plans import N, calls_of


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


def launches_of(*args, **options):
    """All launches that differ."""
    return list(dict.fromkeys(call.launch for call in calls_of(*args, **options)))


def faults(launch, capability):
    """What is wrong with the machine code of a launch."""
    code = compile_for(launch, capability)
    if code.stack > 0:
        yield f"{launch} spills: {code.stack} bytes of stack, {code.registers} registers"
    if code.shared > SHARED[capability]:
        yield f"{launch} takes {code.shared} bytes of shared memory"
    if launch.kernel.__name__ in ("_product_kernel", "_count_kernel", "_collect_kernel", "_weigh_kernel"):
        types = {kind for _, kind in launch.signature}
        constants = dict(launch.constants)
        by_hand = constants.get("PRECISION") == "ieee" and not types & {"*fp16", "*bf16"}
        by_hand = by_hand or ("PRECISION" in constants and not constants.get("WITH_GRADIENT", True))
        if not by_hand and not re.search(MATRIX_INSTRUCTION[capability], code.ptx):
            yield f"{launch} has no {MATRIX_INSTRUCTION[capability]}"


KERNELS = {
    "_select_kernel",
    "_compact_kernel",
    "_weigh_kernel",
    "_combine_kernel",
    "_keys_gradient_kernel",
    "_sample_query_gradient_kernel",
    "_sample_keys_gradient_kernel",
}
RECOMPUTING_KERNELS = {
    "_sample_keys_kernel",
    "_sample_kernel",
    "_count_kernel",
    "_place_kernel",
    "_collect_kernel",
    "_select_candidates_kernel",
    "_fall_back_kernel",
}


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.bfloat16, "ieee"), (torch.float32, "ieee"), (torch.float32, "tf32")],
    ids=str,
)
def test_every_configuration(monkeypatch, dtype, precision, capability):
    launches = launches_of(monkeypatch, dtype, precision)
    kernels = {launch.kernel.__name__ for launch in launches}
    assert kernels >= (KERNELS if dtype == torch.float32 else KERNELS | RECOMPUTING_KERNELS)
    found = [fault for launch in launches for fault in faults(launch, capability)]
    assert not found, "\n".join(found)


def test_float16_other_layouts_excluded_keys_and_no_gradient(monkeypatch):
    """On one architecture: they change types, addresses and masks alone."""
    exclude = torch.zeros(N, dtype=torch.int64)
    launches = launches_of(monkeypatch, torch.float16, "ieee", (128,))
    launches += launches_of(monkeypatch, torch.bfloat16, "ieee", key_major=False, exclude=exclude)
    launches += launches_of(monkeypatch, torch.bfloat16, "ieee", (128,), with_gradient=False)
    found = [fault for launch in launches for fault in faults(launch, 90)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("capability", SHARED)
def test_every_pass_of_plan_b_forms_similarities_by_the_same_instruction(monkeypatch, capability):
    """Else a key could be a member in one pass and none in another."""
    pattern = {
        80: r"mma\.sync\.aligned\.\S+",
        90: r"wgmma\.mma_async\S+",
        100: r"tcgen05\.mma\.cta_group\S+",
    }[capability]
    launches = launches_of(monkeypatch, torch.bfloat16, "ieee", (128, 256))
    for channels in (128, 256):
        instructions = {}
        for launch in launches:
            if dict(launch.constants).get("CHANNELS") == channels and "sample_keys" in dict(launch.signature):
                instructions[launch.kernel.__name__] = set(re.findall(pattern, compile_for(launch, capability).ptx))
        assert set(instructions) >= {"_sample_kernel", "_count_kernel", "_collect_kernel"}
        (product,) = set(map(frozenset, instructions.values()))
        assert len(product) == 1
        last = next(
            launch
            for launch in launches
            if launch.kernel.__name__ == "_weigh_kernel"
            and "members" in dict(launch.signature)
            and dict(launch.constants)["CHANNELS"] == channels
        )
        assert product <= set(re.findall(pattern, compile_for(last, capability).ptx))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_offsets_have_64_bits(monkeypatch, dtype):
    """No product of 32-bit numbers is widened afterwards: strides are multiplied in 64 bits or as 32 x 32 to 64."""
    for launch in launches_of(monkeypatch, dtype, "ieee"):
        ptx = compile_for(launch, 90).ptx
        narrow = set(re.findall(r"(?:mul\.lo|mad\.lo)\.s32\s+(%r\d+)", ptx))
        widened = set(re.findall(r"cvt\.s64\.s32\s+%rd\d+,\s*(%r\d+)", ptx))
        widened |= set(re.findall(r"mul\.wide\.s32\s+%rd\d+,\s*(%r\d+)", ptx))
        assert not narrow & widened, f"{launch}: {sorted(narrow & widened)}"
