"""SAIB's Triton kernels on the CPU, run by test_saib_interpreter.py."""

import pytest
import torch
import torch.nn.functional as F
from interpreted import only_in_interpreter
from triton_cases import NAMES, Case, assert_accurate, by_module, by_reference, problem

from accuracy import assert_as_accurate
from iecl_fast.saib import ops, reference, triton
from iecl_fast.saib import triton_launch as launch
from iecl_fast.saib import triton_plan as plan

only_in_interpreter()

BATCH, PATCH = True, False
HALF = torch.float16


@pytest.fixture
def small_tiles(monkeypatch):
    """So that a small problem has several tiles of positions, channels and sums."""
    monkeypatch.setattr(plan, "product_tile", lambda *_: plan.ProductTile(64, 32, 16, 1, 1))
    monkeypatch.setattr(plan, "weight_tile", lambda *_: plan.WeightTile(32, 32, 32, 1, 1))
    monkeypatch.setattr(plan, "weight_splits", lambda *_: 3)
    monkeypatch.setattr(plan, "tail_tile", lambda *_: None)
    yield


SPLIT = [
    Case((5, 3, 6, 8), 2, BATCH),
    Case((20, 2, 9, 6), 3, BATCH, layout="channels_last"),
    Case((12, 2, 6, 6), 2, BATCH, HALF, "silu", layout="transposed"),
    Case((9, 1, 8, 12), 4, PATCH, HALF),
    Case((2, 1, 10, 15), 5, PATCH, activation="silu", layout="sliced"),
    Case((3, 3, 9, 6), 3, PATCH, positional=False, layout="channels_last"),
    Case((18, 1, 8, 8), 4, BATCH, positional=False, layout="sliced"),
    Case((6, 3, 4, 8), 2, BATCH, expansion="monotone"),
    Case((5, 3, 8, 4), 4, BATCH, activation="silu", expansion="monotone", layout="channels_last"),
    Case((2, 3, 6, 4), 2, PATCH, activation="silu", expansion="monotone"),
    Case((2, 3, 4, 6), 2, PATCH, HALF, expansion="monotone", positional=False),
    Case((1, 1, 2, 2), 2, BATCH),
    Case((1, 1, 1, 1), 1, PATCH),
]


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_a_kernel_for_each_product(case, small_tiles):
    tensors, gradient = problem(case)
    before = [own.clone() for own in (*tensors, gradient) if own is not None]
    results = by_module(triton, case, tensors, gradient)
    assert_accurate(results, case, tensors, gradient)
    for own, old in zip((own for own in (*tensors, gradient) if own is not None), before):
        assert torch.equal(own, old)
    for name, own in zip(NAMES, tensors):
        if own is not None:
            assert results[name].stride() == torch.empty_like(own).stride() and results[name].dtype == own.dtype
    assert results["output"].stride() == torch.empty_like(tensors[0]).stride()


# Widths for one slice and for three, that fill them and that do not; the tile itself is the plan's.
TAIL = [
    Case((5, 3, 6, 8), 2, BATCH, HALF),
    Case((40, 1, 8, 8), 4, BATCH, HALF, layout="channels_last"),
    Case((3, 3, 8, 12), 4, PATCH, HALF, "silu"),
    Case((2, 2, 15, 10), 5, PATCH, HALF, positional=False),
    Case((20, 2, 6, 8), 2, BATCH),
    Case((3, 1, 8, 12), 4, PATCH, activation="silu"),
]
WIDE_TAIL = [
    Case((66, 1, 12, 16), 4, BATCH, HALF, positional=False),
    Case((100, 1, 8, 16), 4, BATCH, HALF),
    Case((130, 1, 4, 16), 4, BATCH, HALF, layout="sliced"),
    Case((150, 1, 4, 16), 4, BATCH, HALF),
]


@pytest.fixture
def always_tail(monkeypatch):
    """float32 too."""
    tail_tile = plan.tail_tile
    monkeypatch.setattr(plan, "tail_tile", lambda itemsize, *rest: tail_tile(2, *rest))
    yield


@pytest.mark.parametrize("case", TAIL, ids=str)
def test_everything_after_w1_in_one_kernel(case, always_tail):
    tensors, gradient = problem(case)
    assert_accurate(by_module(triton, case, tensors, gradient), case, tensors, gradient)


@pytest.mark.parametrize("case", WIDE_TAIL, ids=str)
def test_wide_tail(case, always_tail):
    """All sums are small integers: nothing is rounded before the last sum."""
    tensors, _ = problem(case)
    output, (first, second) = triton.forward(*tensors, *case.options, True)
    x, position, w1, w2, w3, w4 = (own if own is None else own.double() for own in tensors)
    p = (reference.patchify(x, case.patch_size) + (0 if position is None else position))[None]
    h1 = F.relu(F.conv2d(p, w1))
    h2 = F.relu(F.conv2d(h1, w2, padding=1))
    for rows, truth in ((first, h1), (second, h2)):
        width = truth.shape[1]
        assert torch.equal(rows[:, :width].double(), truth.flatten(2)[0].T)
        assert not rows[:, width:].any()
    truth = reference.saib(x, position, w1, w2, w3, w4, *case.options)
    assert torch.equal(output, truth.to(HALF))


@pytest.mark.parametrize("case", [SPLIT[0], TAIL[2]], ids=str)
def test_nothing_saved(case):
    tensors, _ = problem(case)
    output, saved = triton.forward(*tensors, *case.options, False)
    assert saved == []
    assert torch.equal(output, triton.forward(*tensors, *case.options, True)[0])


@pytest.mark.parametrize(
    "case",
    [
        Case((5, 3, 8, 6), 2, BATCH),
        Case((4, 1, 18, 6), 2, BATCH, activation="silu", layout="channels_last"),
        Case((7, 3, 4, 6), 2, PATCH),
    ],
    ids=str,
)
@pytest.mark.parametrize("at_once", [4, 5])
def test_backward_pass_in_pieces(case, at_once, small_tiles, monkeypatch):
    tensors, gradient = problem(case)
    whole = by_module(triton, case, tensors, gradient)
    monkeypatch.setattr(plan, "units_at_once", lambda units, *_: min(units, at_once))
    pieces = by_module(triton, case, tensors, gradient)
    assert_accurate(pieces, case, tensors, gradient)
    assert torch.equal(whole["x"], pieces["x"])


@pytest.mark.parametrize("case", [Case((5, 3, 4, 6), 2, BATCH), Case((3, 3, 4, 6), 2, PATCH)], ids=str)
def test_only_what_is_needed(case, small_tiles):
    tensors, gradient = problem(case)
    _, saved = triton.forward(*tensors, *case.options, True)
    everything = triton.backward(gradient, *tensors, saved, *case.options, [True] * 6)
    for place in range(6):
        needs = [other == place for other in range(6)]
        (one,) = triton.backward(gradient, *tensors, saved, *case.options, needs)
        assert torch.equal(one, everything[place])


def test_expanded_gradient_and_weights_of_other_layouts_and_dtypes(small_tiles):
    case = Case((5, 3, 4, 6), 2, BATCH, HALF)
    tensors, _ = problem(case)
    gradient = torch.ones(1, 1, 1, 1, dtype=HALF).expand(case.shape)
    tensors[1] = tensors[1].float()
    tensors[3] = tensors[3].float().contiguous(memory_format=torch.channels_last)
    results = by_module(triton, case, tensors, gradient)
    assert [results[name].dtype for name in NAMES] == [own.dtype for own in tensors]
    assert results["w2"].is_contiguous(memory_format=torch.channels_last)
    truth = by_reference(case, tensors, gradient, torch.float64)
    plain = by_reference(case, tensors, gradient, HALF)
    for name in NAMES:
        assert_as_accurate(results[name].to(HALF), truth[name], plain[name])


def test_offsets_beyond_32_bits():
    """Memory that is never touched costs nothing: rows from 2^27 on of 32 channels, samples 2^31 elements apart."""
    torch.use_deterministic_algorithms(False)
    first, units = 2**27, (2**23, 2**23 + 1)
    shape = launch.Geometry(24, 2**24, 16, 1, 4, 2**24, 16, 4, True, "ieee", True)
    rows, target = (torch.empty(first + 16, 32, dtype=HALF) for _ in range(2))
    values = torch.randn(16, 32).to(HALF)
    rows[first:] = values
    unit = torch.eye(32, dtype=HALF)[None]
    launch.product(shape, launch.Rows(rows), unit, launch.Rows(target), "none", units=units)
    assert torch.equal(target[first:], values)

    case = Case((3, 1, 4, 4), 4, BATCH, HALF)
    tensors, gradient = problem(case)
    expected = by_module(triton, case, tensors, gradient)
    far = torch.empty(2**32 + 16, dtype=HALF).as_strided(case.shape, (2**31, 16, 4, 1))
    tensors[0] = far.copy_(tensors[0])
    results = by_module(triton, case, tensors, gradient)
    assert all(torch.equal(results[name], expected[name]) for name in expected)


@pytest.mark.parametrize("channels_are_batch", [BATCH, PATCH])
def test_empty(channels_are_batch):
    n = 0 if channels_are_batch is PATCH else 4
    case = Case((n, 3, 0 if n else 4, 4), 2, channels_are_batch)
    tensors, gradient = problem(case)
    results = by_module(triton, case, tensors, gradient)
    assert results["output"].shape == results["x"].shape == case.shape
    assert all(not results[name].any() for name in NAMES)


@pytest.mark.parametrize("case", [SPLIT[1], SPLIT[8], TAIL[3]], ids=str)
def test_operators(case, monkeypatch):
    """Fakes tell the truth, and autograd reaches every gradient."""
    monkeypatch.setattr(ops, "_implementation", lambda device_type, x: triton)
    tensors, gradient = problem(case)
    leaves = [own.requires_grad_() if own is not None else None for own in tensors]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.iecl_fast.saib, (*leaves, *case.options, True), test_utils=checks)
    output, _ = torch.ops.iecl_fast.saib(*leaves, *case.options, True)
    output.backward(gradient)
    results = {"output": output.detach()}
    results |= {name: own.grad for name, own in zip(NAMES, leaves) if own is not None}
    assert_accurate(results, case, [None if own is None else own.detach() for own in leaves], gradient)
