"""Plan B': boundaries from brackets, without written similarities; misses, ties, and what falls back."""

import pytest
import torch
import torch.nn.functional as F

from accuracy import assert_as_accurate
from iecl_fast import ring_info_nce
from iecl_fast.ring import dispatch, plan_recompute, plans, reference, ring_ranks, triton_fall_back, triton_recompute
from ring.cases import KINDS, layouts, query_and_keys
from ring.interpreted_selection import install_mutant, sorted_select
from ring.interpreter import serve_cpu_tensors, small_tiles  # noqa: F401
from ring.loss_checks import losses_and_gradients, plain_loss

serve_cpu_tensors()


class Spy:
    """What plan B' found: boundaries, and which rows fell back."""

    def __init__(self):
        self.boundaries, self.missed = [], []

    def of_candidates(self, original):
        def select_candidates(*args):
            result = original(*args)
            self.boundaries.append(result)  # the plan may still write to them
            return result

        return select_candidates

    def of_combine(self, original):
        def combine(*args):
            if len(args) > 7 and args[7].members is None:
                self.missed.append(args[7].missed.clone())
            return original(*args)

        return combine


@pytest.fixture
def spy(monkeypatch):
    """Also: every loss takes plan B', and selection among a sample is by sorting, which is quicker."""
    spy = Spy()
    monkeypatch.setattr(plans, "WRITTEN_BYTES", 0)
    monkeypatch.setattr(plans, "BUFFER_BYTES", 2**24)
    monkeypatch.setattr(plan_recompute, "combine", spy.of_combine(plan_recompute.combine))
    own = dispatch.selection_kernels()
    replaced = own._replace(select=sorted_select, select_candidates=spy.of_candidates(own.select_candidates))
    monkeypatch.setattr(dispatch, "selection_kernels", lambda: replaced)
    return spy


def members(similarities, thresholds, ties, exclude):
    """(N, K) bool by the definition of a boundary."""
    bits = (similarities + 0.0).view(torch.int32)
    keys = torch.where(similarities.isnan(), 2**31 - 1, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    index = torch.arange(similarities.shape[1])

    def below(side):
        threshold, tie = thresholds[:, side, None], ties[:, side, None]
        return (keys < threshold) | ((keys == threshold) & (index < tie))

    mask = below(1) & ~below(0)
    return mask if exclude is None else mask & (index != exclude[:, None])


def problem(rows, num_keys, channels):
    query, keys = query_and_keys("unit", rows, num_keys, channels, torch.float16)
    return query, F.normalize(query.float() + torch.randn(rows, channels) / 4, dim=1).half(), keys


EXACT = [kind for kind in KINDS if kind not in ("random", "unit", "huge")]


@pytest.mark.parametrize("kind", EXACT)
def test_boundaries_are_exact(spy, kind):
    query, keys = query_and_keys(kind, 3, 800, 24, torch.float16)
    similarities = reference.similarity(query, keys)
    for ring in ((90, 99), (0, 50)):
        for exclude in (None, torch.tensor([0, 500, -1])):
            spy.boundaries.clear()
            ring_info_nce(query, query, keys, lower=ring[0], upper=ring[1], exclude=exclude)
            (boundaries,) = spy.boundaries
            found = members(similarities, *boundaries, exclude)
            right = found.eq(reference.member_mask(similarities, *ring, exclude)).all(1)
            # Where they are not, the row was noticed.
            assert (right | (spy.missed[-1] != 0)).all()
            assert right.all(), "no bracket should miss"


def check_accuracy(inputs, ring, exclude=None):
    """Loss and the gradients of query, positive and temperature by the rule of accuracy.py."""
    query, positive_key, keys, temperature = inputs
    mask = reference.member_mask(reference.similarity(query, keys), *ring, exclude)
    options = {"lower": ring[0], "upper": ring[1], "exclude": exclude, "reduction": "none"}

    def of(loss, dtype=None):
        leaves = [tensor.to(dtype) for tensor in (query, positive_key, temperature)]
        own_keys = keys.to(dtype)
        return losses_and_gradients(lambda q, p, t: loss(q, p, own_keys, t), leaves, torch.ones(len(query)))

    def plain(q, p, k, t):
        return plain_loss(q, p, k, t, mask)

    result = of(lambda q, p, k, t: ring_info_nce(q, p, k, temperature=t, **options))
    for values in zip(result, of(plain, torch.float64), of(plain)):
        assert_as_accurate(*values)


@pytest.mark.parametrize("ring", [(0, 100), (90, 99), (0, 50), (55, 100)], ids=str)
def test_as_accurate_as_plain_pytorch(spy, ring):
    check_accuracy((*problem(18, 700, 20), torch.tensor(0.2)), ring)
    assert not spy.missed[-1].any()


def test_excluded_keys(spy):
    check_accuracy((*problem(3, 700, 20), torch.tensor(0.2)), (20, 90), torch.tensor([5, -1, 699]))


def test_every_pass_counts_the_same_members(spy):
    """Random numbers, whose similarities are rounded: the last pass finds as many members as the first counted."""
    for channels in (7, 20, 32):
        query, _, keys = problem(18, 900, channels)
        ring_info_nce(query, query, keys, lower=40, upper=60)
        assert not spy.missed[-1].any()


def test_a_sample_that_misleads_falls_back(spy, monkeypatch):
    monkeypatch.setattr(plan_recompute, "bracket", lambda rank, num_keys, size: (0, 3))
    check_accuracy((*problem(5, 700, 20), torch.tensor(0.2)), (40, 90))
    assert spy.missed[-1].all()
    check_accuracy((*problem(5, 700, 20), torch.tensor(0.2)), (40, 90), torch.tensor([5, -1, 699, 0, 1]))


def test_too_many_candidates_fall_back(spy, monkeypatch):
    monkeypatch.setattr(plan_recompute, "candidate_capacity", lambda *_: 16)
    check_accuracy((*problem(5, 700, 20), torch.tensor(0.2)), (40, 90))
    assert spy.missed[-1].all()


def test_some_rows_fall_back(spy, monkeypatch):
    """Only what missed is done again."""
    original = triton_recompute._place_kernel

    class Raised:
        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                original[grid](*args, **kwargs)
                args[5][2], args[5][5] = 1, 1

            return launch

    monkeypatch.setattr(triton_recompute, "_place_kernel", Raised())
    check_accuracy((*problem(6, 700, 20), torch.tensor(0.2)), (40, 90))
    assert spy.missed[-1].nonzero().flatten().tolist() == [2, 5]


@pytest.mark.parametrize("kind", ["constant", "ties", "zeros"])
def test_many_equal_similarities_do_not_fall_back(spy, kind):
    query, keys = query_and_keys(kind, 3, 1500, 8, torch.float16)
    for ring in ((90, 99), (20, 60)):
        check_accuracy((query, query.flip(0), keys, torch.tensor(2.0)), ring)
        assert not spy.missed[-1].any()


def test_keys_that_are_not_finite(spy):
    """Outside of the ring they do no harm; inside the loss says so."""
    query, keys = torch.ones(3, 4).half(), torch.randn(600, 4).half()
    query[1], query[2] = -1, 0  # -inf, and 0 * inf = NaN
    keys[7] = torch.inf
    query.requires_grad_()

    def loss(lower, upper):
        return ring_info_nce(query, torch.zeros(3, 4).half(), keys, lower=lower, upper=upper, reduction="none")

    everything = loss(0, 100)
    assert everything[0] == torch.inf and everything[1].isfinite() and everything[2].isnan()
    gradient = torch.autograd.grad(everything.sum(), query)[0]
    assert gradient[0].isnan().all() and gradient[1].isfinite().all() and gradient[2].isnan().all()
    inside = loss(1, 99)
    assert inside.isfinite().all()
    assert torch.autograd.grad(inside.sum(), query)[0].isfinite().all()
    truth = reference.ring_info_nce(query.double(), torch.zeros(3, 4), keys.double(), 0.07, 1, 99)
    torch.testing.assert_close(inside.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1e-3, 0.07])
@pytest.mark.parametrize("ring", [(0, 100), (90, 99)], ids=str)
def test_finite_at_any_temperature(spy, ring, temperature):
    query, _, keys = problem(3, 500, 8)
    keys[::7] *= 30
    leaf = query.clone().requires_grad_()
    loss = ring_info_nce(
        leaf, query.flip(0), keys, lower=ring[0], upper=ring[1], temperature=temperature, reduction="none"
    )
    expected = reference.ring_info_nce(query.double(), query.flip(0).double(), keys.double(), temperature, *ring)
    torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-5, atol=1e-3 * temperature)
    assert torch.autograd.grad(loss.sum(), leaf)[0].isfinite().all()


def test_layouts_agree(spy):
    query, keys = query_and_keys("ties", 3, 300, 20, torch.float16)
    losses = set()
    for stored, arguments in layouts(keys).values():
        leaf = query.detach().clone().requires_grad_()
        loss = ring_info_nce(leaf, query.flip(0), stored, lower=50, upper=90, **arguments)
        losses.add((loss.item(), *torch.autograd.grad(loss, leaf)[0].flatten().tolist()))
    assert len(losses) == 1


def test_rows_in_chunks_and_the_same_bits_in_every_run(spy, monkeypatch):
    query, positive_key, keys = problem(20, 700, 20)
    results = []
    for size in (2**24, 2**24, 16 * plan_recompute.bytes_of_row(700, 20)):
        monkeypatch.setattr(plans, "BUFFER_BYTES", size)
        leaf = query.clone().requires_grad_()
        loss = ring_info_nce(leaf, positive_key, keys, lower=20, upper=80, reduction="none")
        results.append((loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]))
    assert all(map(torch.equal, *results[:2]))
    assert len(spy.missed[-1]) == 4
    for result, expected in zip(results[2], results[0]):
        torch.testing.assert_close(result, expected)


def test_a_bracket_holds_its_rank():
    """By far more often than once in a million, and the candidates fit."""
    num_keys, size = 65536, 8192
    generator = torch.Generator().manual_seed(0)
    for lower, upper in ((90, 99), (0.1, 99.9), (50, 51)):
        ranks = ring_ranks(lower, upper, num_keys)
        brackets = tuple(plan_recompute.bracket(rank, num_keys, size) for rank in ranks)
        capacity = plan_recompute.candidate_capacity(brackets, num_keys, size)
        assert capacity < num_keys / 4
        for _ in range(50):
            sample = torch.randperm(num_keys, generator=generator)[:size].sort().values  # ranks, as values
            edges = torch.cat([torch.tensor([-1]), sample, torch.tensor([num_keys])])
            found = [(edges[first], edges[end + 1]) for first, end in brackets]
            for rank, (first, end) in zip(ranks, found):
                assert first <= rank < end
            assert sum(end - first for first, end in found) <= capacity


def check_plan(spy, monkeypatch):
    """Right results, without falling back, and by falling back; what the broken copies below have to fail."""
    exclude = torch.tensor([300, -1, 250])
    check_accuracy((*problem(3, 600, 20), torch.tensor(0.2)), (0, 60))
    assert not spy.missed[-1].any()
    query, keys = query_and_keys("sorted", 3, 600, 20, torch.float16)
    check_accuracy((query, query.flip(0), keys, torch.tensor(9.0)), (20, 90), exclude)
    assert not spy.missed[-1].any()
    with monkeypatch.context() as patch:
        patch.setattr(plan_recompute, "candidate_capacity", lambda *_: 16)
        for ring in ((30.2, 60), (30.2, 100)):  # the first rank is another one among 599 keys
            check_accuracy((query, query.flip(0), keys, torch.tensor(9.0)), ring, exclude)
    test_keys_that_are_not_finite(spy)


def test_the_plan(spy, monkeypatch):
    check_plan(spy, monkeypatch)


MUTANTS = (
    (triton_recompute, "begin + bits.to(tl.int64) % tl.maximum(width, 1)", "cell.to(tl.int64)"),
    (triton_recompute, "count_1 += ((total >> 8) & 255)", "count_1 += (total & 255)"),
    (
        triton_recompute,
        "valid = (columns < num_keys)[None, :] & (index != excluded[:, None])",
        "valid = index != excluded[:, None]",
    ),
    (
        triton_recompute,
        "valid = (columns < num_keys)[None, :] & (index != excluded[:, None])",
        "valid = (columns < num_keys)[None, :]",
    ),
    (triton_recompute, "upper - below_0 - between", "upper - below_0"),
    (triton_recompute, "tl.cumsum(candidates, 0) - candidates", "tl.cumsum(candidates, 0)"),
    (triton_recompute, "lower = lower_of_rest", "lower = lower_of_rest + 1"),
    (triton_recompute, "tl.cumsum(number, 1) - 1", "tl.cumsum(number, 1)"),
    (triton_recompute, "offset += tl.sum(number, 1)", "offset += 0"),
    (
        triton_recompute,
        "member & (columns < num_keys)[None, :] & (index != excluded)",
        "member & (columns < num_keys)[None, :]",
    ),
    (triton_recompute, "weighted * scale[:, None]", "weighted"),
    (triton_recompute, "total = total * scale + tl.sum(weights, 1)", "total = total + tl.sum(weights, 1)"),
    (triton_fall_back, "tl.where(other_rank == count, NAN_KEY, upper_threshold)", "upper_threshold"),
    (triton_fall_back, "rank = lower_of_rest", "rank = lower"),
    (triton_fall_back, "(columns != excluded)", "(columns != -1)"),
    (triton_fall_back, "part += num_rows", "part += 0"),
    (triton_fall_back, "finite_or_zero(vectors)", "vectors"),
)


@pytest.mark.parametrize("number", range(len(MUTANTS)))
def test_broken_copies_are_found(spy, monkeypatch, tmp_path, number):
    install_mutant(monkeypatch, tmp_path, *MUTANTS[number])
    with pytest.raises(AssertionError):
        check_plan(spy, monkeypatch)
