"""The CUDA kernels that write members of the ring and gradients, run on the host by csrc/simt."""

import device_checks
import pytest
import torch
from similarities import KINDS, boundaries_of_ranks
from simt_ring import DTYPES, Kernels


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_compact(simt, kind, splits):
    simt.set_seed(KINDS.index(kind))
    device_checks.check_compact(Kernels(simt, splits), kind, 5001)


@pytest.mark.parametrize("layout", ["not aligned", "transposed", "key stride"])
def test_compact_layouts(simt, layout):
    for splits in (1, 2):
        device_checks.check_compact(Kernels(simt, splits), "ties", 4613, layout)


@pytest.mark.parametrize("k", [1, 2, 9, 127, 4096, 4097])
def test_compact_sizes(simt, k):
    device_checks.check_compact(Kernels(simt, 1), "ties", k)
    device_checks.check_compact(Kernels(simt, 5), "ties", k)


def test_compact_without_indices(simt):
    similarities = torch.randn(2, 300)
    boundaries = boundaries_of_ranks(similarities, [10, 290, 0, 0], None)
    with_indices, _ = Kernels(simt).compact(similarities, *boundaries, None, 280, True)
    values, indices = Kernels(simt).compact(similarities, *boundaries, None, 280, False)
    assert torch.equal(values, with_indices) and indices.shape == (0, 280)


def test_compact_writes_no_more_than_it_was_asked_for(simt):
    device_checks.check_room(Kernels(simt, 1))
    device_checks.check_room(Kernels(simt, 2))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", ["unit", "ties", "nan", "half infinite"])
def test_draw(simt, kind, splits):
    device_checks.check_draw(Kernels(simt, splits), kind, 777)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "not aligned", "transposed", "key stride"])
def test_query_gradient(simt, dtype, layout):
    device_checks.check_query_gradient(Kernels(simt), dtype, 1500, 128, layout)
    device_checks.check_query_gradient(Kernels(simt), dtype, 37, 131, layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("skewed", [False, True])
def test_keys_gradient(simt, dtype, skewed):
    device_checks.check_keys_gradient(Kernels(simt), dtype, 600, 130, skewed)


def test_gradients_are_the_same_bits_in_any_order_of_threads(simt):
    gradient, indices, matrix = torch.randn(2, 700), torch.randint(0, 9, (2, 700)), torch.randn(9, 20)
    results = []
    for seed in range(3):
        simt.set_seed(seed)
        kernels = Kernels(simt)
        results.append(
            (
                kernels.query_gradient(gradient, indices, matrix),
                kernels.keys_gradient(gradient, indices, matrix[:2], 9),
            )
        )
    device_checks.assert_equal(results[0], results[1])
    device_checks.assert_equal(results[0], results[2])


def test_empty(simt):
    kernels, indices = Kernels(simt), torch.empty(2, 0, dtype=torch.int64)
    assert (kernels.query_gradient(torch.empty(2, 0), indices, torch.randn(5, 3)) == 0).all()
    assert (kernels.keys_gradient(torch.empty(2, 0), indices, torch.randn(2, 3), 4) == 0).all()
    simt.take_counters()
    no_rows, no_boundaries = torch.empty(0, 7), (torch.empty(0, 2).int(), torch.empty(0, 2).long())
    assert kernels.compact(no_rows, *no_boundaries, None, 3, True)[1].shape == (0, 3)
    assert kernels.draw(no_rows, *no_boundaries, None, torch.empty(0, 4).double(), [1, 2, 0, 0], True)[0].numel() == 0
    assert kernels.query_gradient(torch.empty(0, 3), torch.empty(0, 3).long(), torch.randn(5, 3)).shape == (0, 3)
    assert kernels.keys_gradient(torch.empty(2, 0), indices, torch.randn(2, 3), 0).shape == (0, 3)
    assert kernels.query_gradient(torch.ones(2, 1), torch.zeros(2, 1).long(), torch.empty(5, 0)).shape == (2, 0)
    assert simt.take_counters().launches == 0
