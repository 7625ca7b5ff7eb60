"""The operators of csrc/library_cuda.cu on CPU tensors, by csrc/simt: what plans of several kernels are tested with."""

import re

import pytest
import simt_ring
import torch
from similarities import boundaries_of_ranks, make_similarities, members
from simt_build import CSRC

kernels = torch.ops.iecl_fast


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    simt_ring.register_on_cpu()


def test_schemas_are_those_of_the_library():
    text = re.sub(r'"\s*\n\s*"', "", (CSRC / "library_cuda.cu").read_text())
    defined = re.findall(r'm\.def\("(_ring\w+\(.*?)"\);', text)
    assert defined == simt_ring.SCHEMAS.strip().splitlines()
    for schema in defined:
        name, arguments = schema.split("(", 1)
        assert str(getattr(kernels, name).default._schema) == f"iecl_fast::{name}({arguments}"


def test_sample():
    """What ring_sample does after the product."""
    similarities, exclude = make_similarities("ties", 3, 900), torch.tensor([4, 899, 0])
    ranks = [0, 0, 700, 850]
    boundaries = kernels._ring_select(similarities, ranks, exclude)
    assert all(map(torch.equal, boundaries, boundaries_of_ranks(similarities, ranks, exclude)))
    expected = torch.stack(members(similarities, ranks, exclude))
    values, indices = kernels._ring_compact(similarities, *boundaries, exclude, 150, True)
    assert torch.equal(indices, expected) and torch.equal(values, similarities.gather(1, expected))
    values, none = kernels._ring_compact(similarities, *boundaries, exclude, 150, False)
    assert torch.equal(values, similarities.gather(1, expected)) and none.shape == (0, 150)

    uniform = torch.rand(3, 20, dtype=torch.float64)
    values, indices = kernels._ring_draw(similarities, *boundaries, exclude, uniform, ranks, True)
    assert torch.equal(indices, expected.gather(1, (uniform * 150).long()))
    assert torch.equal(values, similarities.gather(1, indices))


def test_gradients():
    query, keys = torch.randn(3, 8), torch.randn(40, 8)
    indices, gradient = torch.randint(0, 40, (3, 50)), torch.randn(3, 50)
    leaves = [tensor.double().requires_grad_() for tensor in (query, keys)]
    gathered = torch.einsum("nc,nmc->nm", leaves[0], leaves[1][indices])
    expected = torch.autograd.grad(gathered, leaves, gradient.double())
    got = (
        kernels._ring_sample_query_gradient_cuda(gradient, indices, keys),
        kernels._ring_sample_keys_gradient_cuda(gradient, indices, query, 40),
    )
    for a, b in zip(got, expected):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_candidates():
    keys = torch.tensor([[[5, 7, -1], [7, 0, 0]]], dtype=torch.int32)
    indices = torch.tensor([[[2, 3, -1], [9, -1, -1]]], dtype=torch.int32)
    counts, ranks = torch.tensor([[2, 1]], dtype=torch.int32), torch.tensor([[1, 2]])
    thresholds, ties = kernels._ring_select_candidates(keys, indices, counts, ranks)
    assert thresholds.tolist() == [[7, 7]] and ties.tolist() == [[3, 9]]
