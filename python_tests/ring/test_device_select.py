"""Selection of ranks by the CUDA kernels, run on the host by csrc/simt."""

import device_checks
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from similarities import KINDS, boundaries_of_ranks
from simt_ring import Kernels


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_select(simt, kind, splits):
    simt.set_seed(KINDS.index(kind))
    device_checks.check_select(Kernels(simt, splits), kind, 3001)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("layout", ["not aligned", "transposed", "key stride"])
def test_layouts(simt, layout, splits):
    device_checks.check_select(Kernels(simt, splits), "ties", 4613, layout)
    device_checks.check_select(Kernels(simt, splits), "unit", 4613, layout)


@pytest.mark.parametrize("k", [1, 2, 3, 31, 129, 4103])
def test_sizes(simt, k):
    for splits in (1, 4):
        device_checks.check_select(Kernels(simt, splits), "ties", k)


values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, 3e38, -3e38, 1e-45, -1e-45, float("inf"), -float("inf")])
values |= st.sampled_from([float("nan"), -float("nan")]) | st.floats(width=32)


@given(st.data())
def test_any_rows(simt, data):
    row = data.draw(st.lists(values, min_size=1, max_size=40))
    k = len(row)
    similarities = torch.tensor([row])
    exclude = data.draw(st.none() | st.integers(-1, k - 1).map(lambda key: torch.tensor([key])))
    ranks = sorted(data.draw(st.lists(st.integers(0, k), min_size=2, max_size=2)))
    ranks += sorted(data.draw(st.lists(st.integers(0, k - 1), min_size=2, max_size=2)))
    simt.set_seed(data.draw(st.integers(0, 3)))
    got = Kernels(simt, data.draw(st.integers(1, 3))).select(similarities, ranks, exclude)
    device_checks.assert_equal(got, boundaries_of_ranks(similarities, ranks, exclude))


@pytest.mark.parametrize("kind", KINDS)
def test_select_candidates(simt, kind):
    simt.set_seed(KINDS.index(kind))
    device_checks.check_select_candidates(Kernels(simt), kind)


def test_ranks_that_no_candidate_has_do_no_harm(simt):
    device_checks.check_bad_candidates(Kernels(simt))


def test_offsets_of_64_bits(simt):
    device_checks.check_offsets(Kernels(simt, 1))
    device_checks.check_offsets(Kernels(simt, 2))


def test_ends_of_the_order(simt):
    """The two ends need no search: nothing is read."""
    similarities = torch.randn(2, 500)
    for splits in (1, 2):
        simt.take_counters()
        thresholds, ties = Kernels(simt, splits).select(similarities, [0, 500, 0, 499], torch.tensor([-1, 3]))
        assert thresholds.tolist() == [[-(2**31), 2**31 - 1]] * 2
        assert ties.tolist() == [[0, 500]] * 2
        if splits == 1:
            assert simt.take_counters().global_load_bytes < 2 * 512 * 32  # exclude, by every thread


def test_empty(simt):
    simt.take_counters()
    kernels = Kernels(simt)
    assert kernels.select(torch.empty(0, 7), [1, 2, 0, 0], None)[0].shape == (0, 2)
    no_candidates = [torch.empty(0, 4, 5, dtype=torch.int32)] * 2
    counts, ranks = torch.empty(0, 4, dtype=torch.int32), torch.empty(0, 2, dtype=torch.int64)
    assert kernels.select_candidates(*no_candidates, counts, ranks)[0].shape == (0, 2)
    assert simt.take_counters().launches == 0
    thresholds, ties = kernels.select(torch.empty(2, 0), [0, 0, 0, 0], None)
    assert (thresholds == -(2**31)).all() and (ties == 0).all()


def test_results_are_the_same_in_any_order_of_threads(simt):
    similarities = torch.cat([torch.randn(1, 2500), torch.zeros(1, 2500)])
    for splits in (1, 2):
        results = []
        for seed in range(3):
            simt.set_seed(seed)
            results.append(Kernels(simt, splits).select(similarities, [700, 2000, 0, 0], None))
        device_checks.assert_equal(results[0], results[1])
        device_checks.assert_equal(results[0], results[2])


def test_splits(simt):
    """Long rows are always shared, short ones never, others if there are too few to fill a chip."""
    assert simt.splits_of(256, 65536) == simt.splits_of(1, 4096) == simt.splits_of(1000, 1) == 1
    assert simt.splits_of(0, 1) == simt.splits_of(0, 0) == 1
    assert simt.splits_of(52, 1_281_167) == 10
    assert simt.splits_of(2, 1_281_167) == 19
    assert simt.splits_of(1024, 1_281_167) == 10
