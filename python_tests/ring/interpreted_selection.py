"""Selection, compaction and draws in Triton on given similarities; broken copies of all kernels, which must fail."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from accuracy import assert_as_accurate
from iecl_fast.ring import (
    dispatch,
    plans,
    reference,
    ring_ranks,
    triton_combine,
    triton_fall_back,
    triton_gradients,
    triton_info_nce,
    triton_order,
    triton_recompute,
    triton_select,
)
from ring.interpreter import small_tiles  # noqa: F401

BLOCK = 128
RINGS = ((0, 100), (0, 30), (47, 52), (90, 100))


@pytest.fixture(autouse=True)
def small_blocks(small_tiles, monkeypatch):  # noqa: F811
    monkeypatch.setattr(triton_select, "BLOCK", BLOCK)


def similarities_of(kind, rows, num_keys):
    """(rows, K) float32 on which selection goes wrong, in the order given."""
    values = torch.randint(-3, 4, (rows, num_keys)).float()  # many ties, -0.0 among them
    values[values == 0] *= -1
    values[:, num_keys // 2] = 0  # in the middle of the middle
    if kind == "distinct":
        values = torch.randn(rows, num_keys)
    elif kind == "equal":
        values = torch.full((rows, num_keys), -1.5)
    elif kind == "infinite":
        values[torch.rand(rows, num_keys) < 0.4] = torch.inf
        values[torch.rand(rows, num_keys) < 0.4] = -torch.inf
    elif kind == "nan":
        values[torch.rand(rows, num_keys) < 0.2] = torch.nan
        values[torch.rand(rows, num_keys) < 0.2] = -torch.nan
    elif kind == "equal leading bits":
        values = (torch.randint(0, 50, (rows, num_keys), dtype=torch.int32) + 0x3F800000).view(torch.float32)
    elif kind == "all nan":
        values = torch.full((rows, num_keys), torch.nan)
    return values


SIMILARITIES = ("ties", "distinct", "equal", "infinite", "nan", "equal leading bits", "all nan")


def all_ranks(lower, upper, num_keys, exclude):
    return [
        *ring_ranks(lower, upper, num_keys),
        *((0, 0) if exclude is None else ring_ranks(lower, upper, num_keys - 1)),
    ]


def check_selection(module, kinds=SIMILARITIES, rings=RINGS, size=(2, 300)):
    """``module``'s select, compact and draw against the reference."""
    rows, num_keys = size
    for kind in kinds:
        similarities = similarities_of(kind, rows, num_keys)
        for lower, upper in rings:
            for exclude in (None, torch.tensor([num_keys // 2, -1])):
                ranks = all_ranks(lower, upper, num_keys, exclude)
                boundaries = module.select(similarities, ranks, exclude)
                mask = reference.member_mask(similarities, lower, upper, exclude)
                sizes = mask.sum(1)
                most = int(sizes.max())
                values, indices = module.compact(similarities, *boundaries, exclude, most, True)
                uniform = torch.tensor([[0.0, 0.5, 1 - 2**-53]], dtype=torch.float64).expand(rows, 3)
                drawn = module.draw(similarities, *boundaries, exclude, uniform, ranks, True)[1]
                for row in range(rows):
                    expected = mask[row].nonzero()[:, 0]
                    count = len(expected)
                    assert torch.equal(indices[row, :count], expected), (kind, lower, upper)
                    bits = values[row, :count].view(torch.int32)
                    assert torch.equal(bits, similarities[row, expected].view(torch.int32))
                    places = torch.tensor([0, count // 2, count - 1])
                    assert torch.equal(drawn[row], expected[places])


@pytest.mark.parametrize("kind", SIMILARITIES)
def test_selection(kind):
    check_selection(triton_select, [kind])


@pytest.mark.parametrize("num_keys", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1])
def test_selection_of_any_number_of_keys(num_keys):
    similarities = similarities_of("ties", 2, num_keys)
    lower = 0 if num_keys == 1 else 50
    boundaries = triton_select.select(similarities, all_ranks(lower, 100, num_keys, None), None)
    expected = reference.member_mask(similarities, lower, 100)
    size = int(expected[0].sum())
    indices = triton_select.compact(similarities, *boundaries, None, size, True)[1]
    assert torch.equal(indices, expected.nonzero()[:, 1].view(2, -1))


def test_similarities_of_any_strides():
    similarities = similarities_of("ties", 300, 2).T
    ranks = all_ranks(30, 70, 300, None)
    contiguous = similarities.contiguous()
    boundaries = triton_select.select(similarities, ranks, None)
    assert all(map(torch.equal, boundaries, triton_select.select(contiguous, ranks, None)))
    assert torch.equal(
        triton_select.compact(similarities, *boundaries, None, 120, False)[0],
        triton_select.compact(contiguous, *boundaries, None, 120, False)[0],
    )


def check_candidates(module):
    """Two ranks among candidates in segments, some of them empty; where a bracket missed, anything but a fault."""
    capacity, num_keys = 150, 400
    counts = torch.tensor([[150, 0, 20], [0, 130, 7]], dtype=torch.int32)
    keys = torch.randint(-3, 4, (2, 3, capacity), dtype=torch.int32)
    indices = torch.stack([torch.randperm(num_keys)[:450].sort().values for _ in range(2)])[:, : 3 * capacity]
    indices = torch.nn.functional.pad(indices, (0, 3 * capacity - indices.shape[1])).view(2, 3, capacity).int()
    valid = torch.arange(capacity) < counts[..., None]
    for ranks in ([[0, 169], [3, 137]], [[85, 170], [0, 1]], [[-5, 900], [136, 4000]]):
        ranks = torch.tensor(ranks)
        thresholds, ties = module.select_candidates(keys, indices, counts, ranks)
        for row in range(2):
            order = sorted(zip(keys[row][valid[row]].tolist(), indices[row][valid[row]].tolist()))
            for side in range(2):
                rank = ranks[row, side].item()
                if 0 <= rank <= len(order):
                    boundary = thresholds[row, side].item(), ties[row, side].item()
                    assert sum(pair < boundary for pair in order) == rank


def test_candidates():
    check_candidates(triton_select)


# ---- whole plans, as the mutants need them -------------------------------------------------------------------------


def problem(rows=18, num_keys=200, channels=20, dtype=torch.float32):
    torch.manual_seed(3)
    query, keys = (F.normalize(torch.randn(n, channels), dim=1).to(dtype) for n in (rows, num_keys))
    return query, F.normalize(query.float() + torch.randn(rows, channels) / 4, dim=1).to(dtype), keys


def kernels_of(select, gradients):
    return plans.Kernels(
        select.select,
        select.select_candidates,
        select.compact,
        select.draw,
        gradients.sample_query_gradient,
        gradients.sample_keys_gradient,
    )


def sorted_select(similarities, ranks, exclude):
    """What select does, by sorting: quicker than the interpreter, where it is not selection that is tested."""
    thresholds = torch.empty(len(similarities), 2, dtype=torch.int32)
    ties = torch.empty(len(similarities), 2, dtype=torch.int64)
    for row, values in enumerate(similarities):
        bits = (values + 0.0).view(torch.int32)
        keys = torch.where(values.isnan(), 2**31 - 1, bits ^ ((bits >> 31) & 0x7FFFFFFF))
        order = keys.argsort(stable=True)
        own = -1 if exclude is None else exclude[row]
        order = order[order != own]
        for side, rank in enumerate(ranks[2:] if own >= 0 else ranks[:2]):
            found = order[rank] if rank < len(order) else len(values)
            thresholds[row, side] = keys[found] if rank < len(order) else 2**31 - 1
            ties[row, side] = found
            if rank == 0:
                thresholds[row, side], ties[row, side] = -(2**31), 0
    return thresholds, ties


def check_loss():
    """Loss and all gradients of plan C, with a row of -inf alone, and a key of no weight that is infinite."""
    kernels = kernels_of(triton_select, triton_gradients)._replace(select=sorted_select)
    temperature = torch.tensor(0.1)
    slope = torch.linspace(0.5, 1.5, 18)
    for lower, upper, exclude in ((20, 90, None), (0, 100, None), (20, 90, torch.arange(18) * 11)):
        query, positive_key, keys = problem()
        ranks = all_ranks(lower, upper, 200, exclude)
        leaves = [tensor.double().requires_grad_() for tensor in (query, positive_key, keys)]
        truth = reference.ring_info_nce(*leaves, 0.1, lower, upper, exclude)
        gradients = torch.autograd.grad((truth * slope).sum(), leaves)
        loss, log_denominator, query_gradient = plans.info_nce(
            query, positive_key, keys, temperature, ranks, exclude, True, kernels
        )
        torch.testing.assert_close(loss, truth.float(), rtol=1e-5, atol=1e-6)
        denominator = truth.detach() + (leaves[0] * leaves[1]).sum(1).detach() / 0.1
        torch.testing.assert_close(log_denominator, denominator, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(query_gradient * slope[:, None], gradients[0].float(), rtol=1e-4, atol=1e-6)
        keys_gradient = plans.info_nce_keys_gradient(
            query, keys, temperature, ranks, exclude, log_denominator, slope, kernels
        )
        torch.testing.assert_close(keys_gradient, gradients[2].float(), rtol=1e-4, atol=1e-6)
    query, positive_key, keys = problem(rows=2)
    keys[5] = torch.inf  # NaN or infinite for all, so outside of the ring
    loss, log_denominator, gradient = plans.info_nce(
        query, positive_key, keys, temperature, all_ranks(20, 90, 200, None), None, True, kernels
    )
    assert loss.isfinite().all() and gradient.isfinite().all()
    query, positive_key, keys = problem(rows=2)
    query = query.abs()
    query[0] = torch.nan
    keys[50:] = -torch.inf  # splits with nothing but -inf
    loss, log_denominator, gradient = plans.info_nce(
        query, positive_key, keys, temperature, all_ranks(0, 100, 200, None), None, True, kernels
    )
    assert loss[0].isnan() and loss[1].isfinite() and gradient[1].isfinite().all()
    # Written by the Triton product, in float16.
    query, positive_key, keys = problem(dtype=torch.float16)
    written = torch.full((18, 200), torch.nan)
    triton_info_nce.write_similarities(query, keys, written, "ieee")
    assert_as_accurate(written, query.double() @ keys.double().T, (query.float() @ keys.float().T))
    alone = plans.info_nce(
        query, query, keys[:40], torch.tensor(1e-3), all_ranks(0, 100, 40, None), None, False, kernels
    )
    own = reference.ring_info_nce(query.double(), query.double(), keys[:40].double(), 1e-3, 0, 100)
    torch.testing.assert_close(alone[0].double(), own, rtol=1e-3, atol=0)


def check_sample_gradients():
    query, _, keys = problem()
    indices = torch.randint(0, 200, (18, 40))  # with duplicates, as drawn
    gradient = torch.randn(18, 40)
    leaves = [tensor.double().requires_grad_() for tensor in (query, keys)]
    truth = torch.autograd.grad(((leaves[0] @ leaves[1].T).gather(1, indices) * gradient).sum(), leaves)
    result = (
        triton_gradients.sample_query_gradient(gradient, indices, keys),
        triton_gradients.sample_keys_gradient(gradient, indices, query, 200),
    )
    for got, wanted in zip(result, truth):
        torch.testing.assert_close(got, wanted.float(), rtol=1e-4, atol=1e-5)


def check_all_selection():
    check_selection(triton_select, ("ties", "nan"), ((47, 52), (30, 100)), (2, 200))
    check_candidates(triton_select)


@pytest.mark.parametrize("check", [check_loss, check_sample_gradients])
def test_plans(check):
    check()


MUTANTS = (
    # off-by-one ranks
    (triton_select, check_all_selection, "    rank = lower\n", "    rank = lower + 1\n"),
    (triton_select, check_all_selection, "rank = lower_of_rest", "rank = lower_of_rest - 1"),
    (triton_select, check_all_selection, "tl.cumsum(equal, 0) == rank + 1", "tl.cumsum(equal, 0) == rank"),
    (triton_select, check_all_selection, "total = num_keys - 1", "total = num_keys"),
    (triton_select, check_all_selection, "at_end = other_rank == total", "at_end = other_rank > total"),
    # wrong order of ties
    (triton_select, check_all_selection, "cumsum(equal, 0) == other_rank", "cumsum(equal, 0, True) == other_rank"),
    (triton_order, check_all_selection, "index >= tie", "index > tie"),
    # wrong order of values
    (triton_order, check_all_selection, "similarity + 0.0", "similarity * 1.0"),
    (triton_order, check_all_selection, "tl.where(similarity == similarity, key, NAN_KEY)", "key"),
    (triton_select, check_all_selection, "(digits >> (32 - 8 * level))", "(digits >> (31 - 8 * level))"),
    # forgotten masks and counts
    (triton_select, check_all_selection, "mask = mask & (element != excluded)\n                if", "if"),
    (triton_select, check_all_selection, "member & mask & (index != excluded)", "member & mask"),
    (triton_select, check_all_selection, "kept += tl.sum(member.to(tl.int32))", "kept += 0"),
    (triton_select, check_all_selection, "            begin += capacity\n        if", "        if"),
    (triton_select, check_all_selection, "rank -= here", "rank -= 0"),
    (triton_info_nce, check_loss, "member & inside[None, :] & (index != excluded)", "member & (index != excluded)"),
    (triton_info_nce, check_loss, "member & inside[None, :] & (index != excluded)", "member & inside[None, :]"),
    (triton_info_nce, check_loss, "& ~below(key, index, lower, lower_tie)", ""),
    (triton_info_nce, check_loss, "finite_or_zero(key_vectors)", "key_vectors"),
    (triton_info_nce, check_loss, 'tl.where(shift == float("-inf"), 0.0, shift)', "shift"),
    (triton_info_nce, check_loss, "total = total * scale +", "total = total +"),
    (triton_info_nce, check_loss, "weighted * scale[:, None]", "weighted"),
    (triton_info_nce, check_loss, "tl.dot(a, b, similarities,", "tl.dot(a, b, similarities * 0.0,"),
    (triton_info_nce, check_loss, "tl.program_id(2) * CHANNELS +", "0 * CHANNELS +"),
    (triton_combine, check_loss, "part_at += num_rows", "part_at += 0"),
    (triton_combine, check_loss, "parts * part_scale", "parts"),
    (triton_combine, check_loss, "(weighted - ring * key)", "weighted"),
    (triton_combine, check_loss, "log1p(ring)", "tl.log(ring)"),
    (triton_gradients, check_loss, "& ~below(key, index, lower, lower_tie)", ""),
    (triton_gradients, check_loss, "& (index != excluded)", ""),
    (triton_gradients, check_loss, "range(0, num_rows, ROWS)", "range(0, ROWS, ROWS)"),
    (triton_gradients, check_loss, "* slope[:, None]", ""),
    (triton_gradients, check_sample_gradients, "range(0, num_samples, SAMPLES)", "range(0, SAMPLES, SAMPLES)"),
    (triton_gradients, check_sample_gradients, "begins + key + 1)", "begins + key + 1) - 1"),
    (triton_gradients, check_sample_gradients, "element // num_samples", "element // num_samples // 2"),
)  # fmt: skip


MODULES = (
    triton_order,
    triton_select,
    triton_info_nce,
    triton_combine,
    triton_gradients,
    triton_recompute,
    triton_fall_back,
)


def install_mutant(monkeypatch, tmp_path, module, text, replacement):
    """Puts functions of a broken copy of a module in the place of its own, wherever they were imported."""
    source = Path(module.__file__).read_text()
    assert text in source, f"{text!r} is no longer in {module.__name__}"
    path = tmp_path / "mutant.py"
    path.write_text(source.replace(text, replacement))
    spec = importlib.util.spec_from_file_location(f"mutant_{tmp_path.name}", path)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    mutant.BLOCK = BLOCK
    own = {name: value for name, value in vars(module).items() if _module_of(value) == module.__name__}
    for place in MODULES:
        for name, value in own.items():
            if getattr(place, name, None) is value:
                monkeypatch.setattr(place, name, getattr(mutant, name))


def _module_of(value):
    """Where a function or a Triton kernel was defined."""
    return getattr(getattr(value, "fn", value), "__module__", None)


@pytest.mark.parametrize("number", range(len(MUTANTS)))
def test_broken_copies_are_found(monkeypatch, tmp_path, number):
    module, check, text, replacement = MUTANTS[number]
    install_mutant(monkeypatch, tmp_path, module, text, replacement)
    with pytest.raises(AssertionError):
        check()


def test_dispatch_without_the_cuda_library():
    if dispatch.library_missing() is None:
        assert dispatch.selection_kernels().select is not triton_select.select
    else:
        assert dispatch.selection_kernels() == kernels_of(triton_select, triton_gradients)
