"""Every Triton kernel of SAIB, in every tile the plan can return, compiled for GPUs that are not there."""

import itertools
import re

import pytest
import torch

pytest.importorskip("triton")

from ahead_of_time import MATRIX_INSTRUCTION, SHARED, compile_for, recorded_launches
from triton_cases import Case, laid_out

from iecl_fast.saib import triton, triton_launch
from iecl_fast.saib import triton_plan as plan

HALF, BFLOAT = torch.float16, torch.bfloat16
BATCH, PATCH = True, False


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def launches_of(monkeypatch, case: Case, precision: str = "ieee"):
    """All launches of a forward and a backward pass that differ in their code."""

    def empty(*shape):
        return torch.empty(*shape, dtype=case.dtype, device="meta")

    _, channels, height, width = case.shape
    p, d = case.patch_size, case.width
    x, gradient = (empty(*case.shape) for _ in range(2))
    if case.layout == "channels_last":
        x, gradient = (laid_out(own, case.layout) for own in (x, gradient))
    position = empty(channels * (height // p) * (width // p), p * p) if case.positional else None
    w4 = empty(d, 2 * d, 1, 1) if case.expansion == "free" else None
    tensors = [x, position, empty(d, d, 1, 1), empty(2 * d, d, 3, 3), empty(2 * d, 2 * d, 1, 1), w4]

    def both():
        _, saved = triton.forward(*tensors, *case.options, True)
        triton.backward(gradient, *tensors, saved, *case.options, [own is not None for own in tensors])

    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, precision
    try:
        return list(dict.fromkeys(recorded_launches(monkeypatch, both)))
    finally:
        matmul.fp32_precision = before


# Each tail tile, each product and weight tile; widths that fill tiles and that do not; few positions and many; straight
# images and scattered.
CASES = [
    Case((12, 3, 32, 32), 4, BATCH, BFLOAT),
    Case((32, 3, 30, 30), 5, BATCH, BFLOAT, layout="channels_last"),
    Case((64, 3, 32, 32), 4, PATCH, HALF, "silu"),
    Case((64, 3, 32, 32), 4, BATCH, BFLOAT, "silu"),
    Case((64, 3, 224, 224), 16, BATCH, BFLOAT),
    Case((96, 3, 32, 32), 4, BATCH, BFLOAT),
    Case((96, 3, 224, 224), 16, BATCH, HALF, layout="channels_last"),
    Case((100, 3, 32, 32), 4, BATCH, BFLOAT, "silu"),
    Case((128, 3, 224, 224), 16, BATCH, BFLOAT),
    Case((128, 3, 32, 32), 4, BATCH, BFLOAT, layout="channels_last"),
    Case((192, 3, 32, 32), 4, BATCH, BFLOAT),
    Case((16, 3, 35, 28), 7, PATCH, HALF, "silu"),
    Case((256, 3, 224, 224), 16, BATCH, BFLOAT),
    Case((250, 3, 30, 30), 5, BATCH, HALF, "silu"),
    Case((256, 3, 224, 224), 16, PATCH, BFLOAT),
    Case((256, 3, 224, 224), 16, BATCH, BFLOAT, "silu", "monotone"),
    Case((256, 3, 32, 32), 4, BATCH),
]


def kind_of(launch, thorough: bool) -> tuple:
    """What tells launches apart that are compiled for different code, not for other numbers in the same code."""
    values = dict(launch.constants)
    left_out = ["D", "K", "N", "O", "PATCH"]
    touches_image = "SLICE" in values or values.get("EPILOGUE") == "skip" or "_IMAGE=True" in str(launch)
    if not touches_image or not thorough:
        left_out.append("BATCH")
    if not thorough:
        left_out += ["LOAD_ACTIVATION", "GRADIENT_ACTIVATION"]
    constants = tuple((name, value) for name, value in launch.constants if name.isupper() and name not in left_out)
    absent = tuple(name for name, value in launch.constants if value is None) if thorough else ()
    straight = {"image_c", "image_h"} <= set(launch.multiples_of_16)
    return launch.kernel, constants, absent, straight, launch.warps


def use_chip(monkeypatch, capability: int) -> None:
    geometry = triton_launch.geometry
    for module in (triton, triton_launch):
        monkeypatch.setattr(module, "geometry", lambda *own: geometry(*own)._replace(hopper=capability >= 90))


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles_and_fits(capability, monkeypatch):
    """One launch of each kind, the first among the cases; of float32 both precisions."""
    use_chip(monkeypatch, capability)
    launches = {}
    for case in CASES:
        for precision in ("ieee", "tf32") if case.dtype == torch.float32 else ("ieee",):
            for launch in launches_of(monkeypatch, case, precision):
                launches.setdefault(kind_of(launch, thorough=capability == 90), launch)
    assert launches
    faults = []
    for launch in launches.values():
        result = compile_for(launch, capability)
        name = f"{launch} for {capability}"
        if result.stack > 0:
            faults.append(f"{name} spills {result.stack} bytes")
        if result.shared > SHARED[capability]:
            faults.append(f"{name} takes {result.shared} bytes of shared memory")
        if re.search(r"\b(atom|red)\.", result.ptx):
            faults.append(f"{name} has atomic operations")
        first_type = dict(launch.signature)[launch.kernel.arg_names[0]]
        if first_type in ("*fp16", "*bf16"):
            if MATRIX_INSTRUCTION[capability] not in result.ptx:
                faults.append(f"{name} has no {MATRIX_INSTRUCTION[capability]}")
            if capability == 90 and "mma.sync" in result.ptx:
                faults.append(f"{name} has mma.sync")
    assert not faults, "\n".join(faults)


def test_cases_have_every_tile(monkeypatch):
    """What the plan returns for any width, either size of numbers and either kind of image is among the cases."""
    flags = (False, True)
    possible = set()
    for size, width, one, other, many, hopper in itertools.product((2, 4), range(1, 400), *[flags] * 4):
        once, twice = plan.padded(width), plan.padded(2 * width)
        positions = 2**20 if many else 2**10
        possible.add(plan.tail_tile(size, positions, width, one, other, hopper))
        possible |= {plan.product_tile(size, positions, outputs, one, hopper) for outputs in (once, twice)}
        # w1, w4; w2, w3
        possible |= {plan.weight_tile(size, once, inputs, True, hopper) for inputs in (once, twice)}
        possible |= {plan.weight_tile(size, twice, inputs, False, hopper) for inputs in (once, twice)}
    seen = {None}
    for name in ("tail_tile", "product_tile", "weight_tile"):
        function = getattr(plan, name)

        def noted(*arguments, function=function):
            seen.add(function(*arguments))
            return function(*arguments)

        monkeypatch.setattr(plan, name, noted)
    for capability in (80, 90):
        with monkeypatch.context() as patch:
            use_chip(patch, capability)
            for case in CASES:
                launches_of(patch, case)
    assert possible <= seen, possible - seen


def test_offsets_have_64_bits(monkeypatch):
    """Images and features beyond 2^31 elements: nothing is multiplied by a stride before it is widened."""
    case = Case((64, 3, 224, 224), 16, PATCH, BFLOAT)
    for launch in launches_of(monkeypatch, case):
        if "ordered_sum" in str(launch):
            continue
        ptx = compile_for(launch, 90).ptx
        assert re.search(r"mul\.wide\.s32|mad\.wide\.s32|cvt\.s64\.s32", ptx), launch
