"""Faults put into SAIB's Triton kernels, which the checks of interpreted_saib.py must find; run like it."""

import importlib.util
import sys
from pathlib import Path

import pytest
from interpreted import only_in_interpreter
from triton_cases import Case, assert_accurate, by_module, problem

from iecl_fast.saib import triton, triton_launch
from iecl_fast.saib import triton_plan as plan

only_in_interpreter()

FOLDER = Path(triton.__file__).parent
KERNELS = {
    "triton_product": ["product_kernel"],
    "triton_tail": ["tail_kernel"],
    "triton_weights": ["weight_gradient_kernel", "ordered_sum_kernel"],
}
SPLIT, TAIL = False, True

# File, what stands there, what a mistake would have put there, and which way of the forward pass shows it.
MUTANTS = [
    ("triton_tiles", "(a + da >= 0) & ", "", SPLIT),
    ("triton_tiles", " & (b + db < extent_b)", "", TAIL),
    ("triton_tiles", "db = (tap % 3 - 1) * SIGN", "db = tap % 3 - 1", SPLIT),
    ("triton_tiles", "tap // 3 - 1", "tap // 3", TAIL),
    ("triton_tiles", "b = i * PATCH + w % PATCH", "b = i * PATCH + w // PATCH", SPLIT),
    ("triton_tiles", "left if Q < PARTS // 2 else right", "left if Q % 2 == 0 else right", SPLIT),
    ("triton_product", "mask=inside[:, None] & (k < D)[None, :]", "mask=inside[:, None]", SPLIT),
    ("triton_product", "(piece + 2 * own)", "(piece + own)", SPLIT),
    ("triton_product", "piece + own, 0.0", "piece, 0.0", SPLIT),
    ("triton_product", "= (step % steps) * BLOCK_K", "= step * BLOCK_K", SPLIT),
    ("triton_tail", "piece += 2 * tl.load", "piece += tl.load", TAIL),
    ("triton_tail", "position_term(position, None, row, cells", "position_term(position, None, row + 1, cells", TAIL),
    ("triton_tail", "third = activate(z, activation).to(dtype)", "third = z.to(dtype)", TAIL),
    ("triton_tail", "load_weight(w4, 0, o1, t", "load_weight(w4, 0, o0, t", TAIL),
    ("triton_weights", "inside = local < count", "inside = local >= 0", SPLIT),
    ("triton_weights", "total += embedded[:, None]", "total += embedded[None, :]", SPLIT),
    ("triton_weights", "for split in range(splits)", "for split in range(splits - 1)", SPLIT),
    ("triton_weights", "mask=within & (accumulate != 0)", "mask=within", SPLIT),
]


def use_mutant(monkeypatch, folder: Path, file: str, old: str, new: str) -> None:
    """Kernels from copies of the source files, one of them changed."""
    changed = 0
    for name in ("triton_tiles", *KERNELS):
        source = (FOLDER / f"{name}.py").read_text()
        if name == file:
            changed = source.count(old)
            source = source.replace(old, new)
        source = source.replace("iecl_fast.saib.triton_tiles", "mutant_triton_tiles")
        path = folder / f"mutant_{name}.py"
        path.write_text(source)
        specification = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(specification)
        monkeypatch.setitem(sys.modules, path.stem, module)
        specification.loader.exec_module(module)
        for kernel in KERNELS.get(name, []):
            monkeypatch.setattr(triton_launch, kernel, getattr(module, kernel))
    assert changed, f"{old!r} is not in {file}.py"


def check(way: bool, monkeypatch) -> None:
    """One problem in several pieces and tiles; raises AssertionError or the interpreter's error on a wrong result."""
    tail_tile = plan.tail_tile
    monkeypatch.setattr(plan, "product_tile", lambda *_: plan.ProductTile(64, 64, 16, 1, 1))
    monkeypatch.setattr(plan, "weight_tile", lambda *_: plan.WeightTile(32, 32, 32, 1, 1))
    monkeypatch.setattr(plan, "weight_splits", lambda *_: 2)
    monkeypatch.setattr(plan, "tail_tile", (lambda _, *rest: tail_tile(2, *rest)) if way == TAIL else lambda *_: None)
    monkeypatch.setattr(plan, "units_at_once", lambda units, *_: min(4, units))
    case = Case((40, 1, 8, 8), 4, True) if way == TAIL else Case((18, 1, 12, 6), 3, True)
    tensors, gradient = problem(case)
    if way == TAIL:
        results = {"output": triton.forward(*tensors, *case.options, False)[0]}
    else:
        results = by_module(triton, case, tensors, gradient)
    assert_accurate(results, case, tensors, gradient)


@pytest.mark.parametrize("way", [SPLIT, TAIL])
def test_without_a_fault(way, monkeypatch, tmp_path):
    use_mutant(monkeypatch, tmp_path, "triton_tiles", "import triton\n", "import triton\n")
    check(way, monkeypatch)


@pytest.mark.parametrize("file, old, new, way", MUTANTS)
def test_a_fault_is_found(file, old, new, way, monkeypatch, tmp_path):
    use_mutant(monkeypatch, tmp_path, file, old, new)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check(way, monkeypatch)
