"""Percentiles as data: the operators' results with numbers, bit for bit, and one compilation for all values."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from iecl_fast import ring_info_nce, ring_sample

RINGS = [(0.0, 100.0), (90.0, 99.0), (0.07, 33.3)]


def data(value):
    return torch.tensor(value, dtype=torch.float64)


def operands(requires_grad=True):
    torch.manual_seed(0)
    shapes = {"query": (5, 8), "positive_key": (5, 8), "keys": (300, 8)}
    tensors = [torch.randn(shape).requires_grad_(requires_grad) for shape in shapes.values()]
    return [*tensors, torch.tensor(0.1, requires_grad=requires_grad)]


@pytest.mark.parametrize("exclude", [None, torch.tensor([7, 0, 299, 7, 1])])
@pytest.mark.parametrize("ring", RINGS)
def test_loss_and_gradients_are_those_of_numbers(ring, exclude):
    results = []
    for lower, upper in (ring, map(data, ring)):
        query, positive_key, keys, temperature = inputs = operands()
        loss = ring_info_nce(
            query, positive_key, keys, lower=lower, upper=upper, temperature=temperature, exclude=exclude
        )
        results.append((loss, *torch.autograd.grad(loss, inputs)))
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("ring", RINGS)
def test_draws_and_gradients_are_those_of_numbers(ring):
    results = []
    for lower, upper in (ring, map(data, ring)):
        query, _, keys, _ = operands()
        generator = torch.Generator().manual_seed(3)
        options = {"num_samples": 40, "generator": generator, "return_indices": True, "exclude": torch.arange(5)}
        similarities, indices = ring_sample(query, keys, lower, upper, **options)
        gradients = torch.autograd.grad(similarities.square().sum(), (query, keys))
        results.append((similarities, indices, *gradients))
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


def test_one_number_and_one_tensor():
    query, positive_key, keys, _ = operands(requires_grad=False)
    expected = ring_info_nce(query, positive_key, keys, lower=20, upper=90)
    assert torch.equal(ring_info_nce(query, positive_key, keys, lower=data(20), upper=90), expected)
    assert torch.equal(ring_info_nce(query, positive_key, keys, lower=20, upper=data(90)), expected)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("exclude", [None, torch.arange(5)])
def test_opcheck(requires_grad, exclude):
    query, positive_key, keys, temperature = operands(requires_grad)
    percentiles = torch.tensor([20.0, 90.0], dtype=torch.float64)
    arguments = (query, positive_key, keys, temperature, percentiles, exclude, requires_grad)
    torch.library.opcheck(torch.ops.iecl_fast.ring_info_nce_scheduled.default, arguments)
    uniform = torch.rand(5, 6, dtype=torch.float64)
    arguments = (query, keys, percentiles, exclude, uniform, True)
    torch.library.opcheck(torch.ops.iecl_fast.ring_draw_scheduled.default, arguments)
    log_denominator, gradient = torch.zeros(5, dtype=torch.float64), torch.ones(5)
    plain = [tensor.detach() for tensor in (query, keys, temperature)]
    arguments = (*plain, percentiles, exclude, log_denominator, gradient)
    torch.library.opcheck(torch.ops.iecl_fast.ring_info_nce_scheduled_keys_gradient.default, arguments)


@pytest.mark.parametrize("empty", [(0, 8)])
def test_no_queries(empty):
    keys, nothing = torch.randn(20, 8), torch.randn(empty)
    assert ring_info_nce(nothing, nothing, keys, lower=data(10), upper=data(90), reduction="none").shape == (0,)


@pytest.mark.parametrize(
    ("lower", "error", "words"),
    [
        (torch.tensor(20.0), TypeError, r"lower is a torch\.float32 tensor"),
        (torch.tensor([20.0], dtype=torch.float64), TypeError, r"lower is .* of shape \(1,\)"),
        (data(101), ValueError, r"lower = 101\.0 is not allowed"),
        (data(95), ValueError, r"lower has to be less than upper"),
        (data(float("nan")), ValueError, r"lower = nan is not allowed"),
    ],
)
def test_what_is_not_allowed(lower, error, words):
    query, positive_key, keys, _ = operands(requires_grad=False)
    with pytest.raises(error, match=words):
        ring_info_nce(query, positive_key, keys, lower=lower, upper=90)
    with pytest.raises(error, match=words):
        ring_sample(query, keys, lower, 90, num_samples=3)


def test_a_ring_whose_size_would_depend_on_data():
    query, _, keys, _ = operands(requires_grad=False)
    with pytest.raises(TypeError, match="without num_samples"):
        ring_sample(query, keys, data(20), 90)


@pytest.mark.parametrize("tensors", [True, False])
def test_one_graph_serves_every_ring_and_numbers_take_one_each(tensors):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    query, positive_key, keys, _ = operands()

    @torch.compile(backend=counter, fullgraph=True)
    def loss(lower, upper):
        return ring_info_nce(query, positive_key, keys, lower=lower, upper=upper)

    counts = []
    for step in range(4):
        lower, upper = 10.0 * step, 95.0 - step
        percentiles = (data(lower), data(upper)) if tensors else (lower, upper)
        expected = ring_info_nce(query, positive_key, keys, lower=lower, upper=upper)
        torch.testing.assert_close(loss(*percentiles), expected)
        counts.append(counter.frame_count)
    assert len(set(counts)) == (1 if tensors else 4)
