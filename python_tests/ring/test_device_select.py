"""Selection of ranks by the CUDA kernels, run on the host by csrc/simt."""

import pytest
import simt_ring
import torch
from similarities import KINDS, boundaries_of_ranks, layouts, make_similarities
from simt_ring import Kernels


@pytest.fixture(scope="module")
def simt():
    return simt_ring.module()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_select(simt, kind, splits):
    simt.set_seed(len(kind))
    n, k = 3, 3001
    similarities = make_similarities(kind, n, k)
    exclude = torch.tensor([-1, 0, k - 1])
    for ranks in ([2700, 2971, 2700, 2970], [1, k - 1, 1, k - 2], [0, 1500, 1501, k - 1], [0, k, 0, k - 1]):
        for name, laid_out in layouts(similarities).items():
            got = Kernels(simt, splits).select(laid_out, ranks, exclude)
            expected = boundaries_of_ranks(similarities, ranks, exclude)
            assert all(map(torch.equal, got, expected)), (name, ranks, got, expected)
