"""Whole plans of CUDA kernels, run on the host by csrc/simt, and of Triton kernels in their interpreter."""

import pytest
import torch

from iecl_fast.ring import dispatch, plan_recompute, plans, reference, triton_gradients
from ring.cases import KINDS, query_and_keys
from ring.interpreted_selection import all_ranks
from ring.interpreter import cpu_sample, small_tiles  # noqa: F401
from ring.simt_ring import register_on_cpu

EXACT = [kind for kind in KINDS if kind not in ("random", "unit", "huge")]


@pytest.fixture(autouse=True)
def cuda_selection(small_tiles):  # noqa: F811
    register_on_cpu()
    dispatch.selection_kernels.cache_clear()
    yield
    dispatch.selection_kernels.cache_clear()


def test_the_cuda_library_is_used_where_it_is():
    kernels = dispatch.selection_kernels()
    assert dispatch.library_missing() is None
    assert kernels.select is torch.ops.iecl_fast._ring_select
    assert kernels.sample_keys_gradient is torch.ops.iecl_fast._ring_sample_keys_gradient_cuda


@pytest.mark.parametrize("kind", EXACT)
def test_four_backends_select_the_same(kind):
    """The reference, C++ on the CPU, CUDA and Triton; also with a key excluded."""
    query, keys = query_and_keys(kind, 3, 700, 24, torch.float32)
    exclude = torch.tensor([0, 350, 699])
    for ring in ((90, 99), (0, 50)):
        for own in (None, exclude):
            ranks = all_ranks(*ring, 700, own)
            expected = cpu_sample(query, keys, *ring, own)[1]
            assert torch.equal(expected, reference.ring_sample(query, keys, *ring, own)[1])
            for kernels in (dispatch.selection_kernels(), dispatch.triton_kernels()):
                assert torch.equal(plans.sample(query, keys, ranks, own, None, True, kernels)[1], expected)


@pytest.mark.parametrize("plan", ["written", "recomputed"])
@pytest.mark.parametrize("kind", ["ties", "constant", "unit", "nan", "infinite"])
def test_losses_and_gradients_are_the_same_bits(monkeypatch, plan, kind):
    """The boundaries are, so all that follows is."""
    monkeypatch.setattr(plans, "WRITTEN_BYTES", 0 if plan == "recomputed" else 2**40)
    monkeypatch.setattr(plans, "BUFFER_BYTES", 2**24)
    monkeypatch.setattr(plan_recompute, "FALL_BACKS", 3)
    query, keys = query_and_keys(kind, 3, 900, 20, torch.float16)
    for exclude in (None, torch.tensor([0, -1, 899])):
        ranks = all_ranks(80, 95, 900, exclude)
        operands = (query, query.flip(0), keys, torch.tensor(0.5), ranks, exclude, True)
        results = [
            plans.info_nce(*operands, kernels) for kernels in (dispatch.selection_kernels(), dispatch.triton_kernels())
        ]
        for result, expected in zip(*results):
            assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_draws_and_their_gradients(dtype):
    query, keys = query_and_keys("ties", 3, 300, 20, dtype)
    ranks = all_ranks(20, 70, 300, None)
    uniform = torch.rand(3, 40, dtype=torch.float64)
    drawn = [
        plans.sample(query, keys, ranks, None, uniform, True, kernels)
        for kernels in (dispatch.selection_kernels(), dispatch.triton_kernels())
    ]
    assert all(map(torch.equal, *drawn))
    gradient, indices = torch.randint(-3, 4, (3, 40)).float(), drawn[0][1]
    assert torch.equal(
        dispatch.selection_kernels().sample_query_gradient(gradient, indices, keys),
        triton_gradients.sample_query_gradient(gradient, indices, keys),
    )
    assert torch.equal(
        dispatch.selection_kernels().sample_keys_gradient(gradient, indices, query, 300),
        triton_gradients.sample_keys_gradient(gradient, indices, query, 300),
    )
