import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from iecl_fast import ring_info_nce, ring_sample
from iecl_fast.ring import reference
from ring.cases import DTYPES, layouts, query_and_keys
from ring.loss_checks import check_accuracy, check_finite, check_infinite_query, check_tied_keys
from torch_threads import torch_threads

RINGS = ((0, 100), (90, 99), (0, 50), (20, 21), (55, 100))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(7, 300, 20), (5, 9000, 16)], ids=str)
@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_as_accurate_as_plain_pytorch(ring, size, dtype):
    check_accuracy(ring, size, dtype, draws=8)


def test_definition_has_the_right_gradients():
    query, keys = query_and_keys("unit", 3, 12, 4, torch.float64)
    inputs = [query, F.normalize(torch.randn_like(query), dim=1), keys, torch.tensor(0.5, dtype=torch.float64)]
    for tensor in inputs:
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(lambda *args: reference.ring_info_nce(*args, 30, 80), inputs)
    assert torch.autograd.gradcheck(lambda q, k: reference.ring_sample(q, k, 30, 80)[0], (inputs[0], inputs[2]))


@pytest.mark.parametrize("k", [300, 20_000])
def test_excluded_keys(k):
    query, keys = query_and_keys("unit", 4, k, 8, torch.float32)
    exclude = torch.tensor([0, -1, k - 1, 5])
    loss = ring_info_nce(query, query, keys, lower=10, upper=90, exclude=exclude, temperature=0.5, reduction="none")
    expected = reference.ring_info_nce(query.double(), query.double(), keys.double(), 0.5, 10, 90, exclude)
    torch.testing.assert_close(loss, expected.float())
    everything = ring_info_nce(query, query, keys, exclude=exclude, temperature=0.5, reduction="none")
    expected = reference.ring_info_nce(query.double(), query.double(), keys.double(), 0.5, 0, 100, exclude)
    torch.testing.assert_close(everything, expected.float())


def test_exclude_of_any_strides():
    query, keys = query_and_keys("unit", 4, 300, 8, torch.float32)
    for exclude in (torch.arange(8)[::2], torch.tensor([7]).expand(4)):
        options = {"lower": 10, "upper": 90, "reduction": "none"}
        key_gradients, losses = [], []
        for index in (exclude, exclude.clone(memory_format=torch.contiguous_format)):
            leaf = keys.clone().requires_grad_()
            losses.append(ring_info_nce(query, query, leaf, exclude=index, **options))
            key_gradients += torch.autograd.grad(losses[-1].sum(), leaf)
            assert not (ring_sample(query, keys, 10, 90, exclude=index, return_indices=True)[1] == index[:, None]).any()
        assert torch.equal(*losses)
        assert torch.equal(*key_gradients)


def test_layouts_agree():
    query, keys = query_and_keys("unit", 5, 5000, 24, torch.float32)
    results = set()
    for stored, arguments in layouts(keys).values():
        leaf = query.clone().requires_grad_()
        loss = ring_info_nce(leaf, query.flip(0), stored, lower=50, upper=90, **arguments)
        loss.backward()
        results.add((loss.item(), leaf.grad.sum().item()))
    assert len(results) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [1e-3, 0.005, 0.01, 0.07, 0.5])
@pytest.mark.parametrize("ring", [(0, 100), (90, 99)], ids=str)
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_finite_at_any_temperature(ring, temperature, dtype, spread):
    check_finite(ring, temperature, dtype, spread, n=6, k=5000)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_rows_are_finite(dtype):
    query, keys = query_and_keys("unit", 4, 100, 8, dtype)
    query[0] = keys[5] = 0
    query.requires_grad_()
    loss = ring_info_nce(query, query.detach().flip(0), keys, lower=10, upper=90, temperature=0.01)
    loss.backward()
    assert loss.isfinite() and query.grad.isfinite().all()


def test_infinite_and_nan_members():
    """A member at +inf makes the loss infinite, one that is NaN makes it NaN, as for log-sum-exp; others do no harm."""
    query, keys = torch.ones(3, 2), torch.randn(6000, 2)
    query[1], query[2] = -1, 0  # -inf, and 0 * inf = NaN
    keys[7] = torch.inf
    query.requires_grad_()

    def loss(lower, upper):
        return ring_info_nce(query, torch.zeros(3, 2), keys, lower=lower, upper=upper, reduction="none")

    assert loss(0, 100).tolist()[0] == math.inf and loss(0, 100)[1].isfinite() and loss(0, 100)[2].isnan()
    inside = loss(0.1, 99.9)  # the worst key of each row is outside
    assert inside.isfinite().all()
    assert torch.autograd.grad(inside.sum(), query)[0].isfinite().all()


def test_an_infinite_query_leaves_the_other_rows_alone():
    check_infinite_query(n=150, k=3000)


@pytest.mark.parametrize("kind", ["constant", "ties", "sorted", "signed_zeros"])
@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_tied_keys(kind, ring):
    check_tied_keys(kind, ring, n=6, k=8000)


def hashed_sample(num_keys, size):
    """Which keys the kernel looks at first (splitmix64 of the cell's number, csrc/ring/select_cpu.cpp)."""
    bits = 2**64 - 1
    sample = []
    for cell in range(size):
        value = (cell + 0x9E3779B97F4A7C15) & bits
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & bits
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & bits
        begin, end = cell * num_keys // size, (cell + 1) * num_keys // size
        sample.append(begin + (value ^ (value >> 31)) % (end - begin))
    return sample


def test_a_sample_that_misleads_is_noticed():
    """Every key that the sample may see is far away from all others, so every bracket misses."""
    num_keys = 6000
    size = int(1.8 * num_keys ** (2 / 3)) // 192 * 192
    query, keys = query_and_keys("random", 5, num_keys, 6, torch.float32)
    query = query.abs()
    keys[hashed_sample(num_keys, size)] += 100
    query.requires_grad_()
    loss = ring_info_nce(query, query.detach(), keys, lower=40, upper=60, temperature=10.0, reduction="none")
    double = query.detach().double().requires_grad_()
    expected = reference.ring_info_nce(double, query.detach().double(), keys.double(), 10.0, 40, 60)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    gradients = torch.autograd.grad(loss.sum(), query)[0], torch.autograd.grad(expected.sum(), double)[0]
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=1e-5, atol=1e-6)


def test_plain_loss_is_cross_entropy():
    query, keys = query_and_keys("unit", 8, 500, 16, torch.float32)
    logits = torch.cat([(query * query.flip(0)).sum(1, keepdim=True), query @ keys.T], dim=1) / 0.07
    expected = F.cross_entropy(logits, torch.zeros(8, dtype=torch.long))
    torch.testing.assert_close(ring_info_nce(query, query.flip(0), keys), expected)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 1, 1)])
@pytest.mark.parametrize("n", [0, 1, 4])
def test_temperature_of_any_shape_with_one_element(shape, n):
    query, keys = query_and_keys("unit", n, 50, 6, torch.float32)
    results = []
    for temperature in (torch.tensor(0.3), torch.full(shape, 0.3)):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, query, keys, temperature)]
        loss = ring_info_nce(*leaves[:3], lower=10, upper=90, temperature=leaves[3], reduction="none")
        results.append([loss, *torch.autograd.grad(loss.sum(), leaves)])
    assert results[1][4].shape == shape
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other.reshape(one.shape))


def test_reductions():
    query, keys = query_and_keys("unit", 8, 500, 16, torch.float32)
    none = ring_info_nce(query, query, keys, reduction="none")
    assert none.shape == (8,)
    assert torch.equal(ring_info_nce(query, query, keys, reduction="sum"), none.sum())
    assert torch.equal(ring_info_nce(query, query, keys), none.mean())


def test_no_queries():
    query = torch.empty(0, 4, requires_grad=True)
    keys = torch.randn(20, 4, requires_grad=True)
    loss = ring_info_nce(query, torch.empty(0, 4), keys, reduction="sum")
    loss.backward()
    assert loss == 0 and query.grad.shape == (0, 4) and torch.equal(keys.grad, torch.zeros(20, 4))


def run(ring=(90, 99), shape=(70, 6000, 40)):
    torch.manual_seed(1)
    query, keys = query_and_keys("unit", *shape, torch.float32)
    leaves = [query.requires_grad_(), query.detach().flip(0).requires_grad_(), keys.requires_grad_()]
    loss = ring_info_nce(*leaves, lower=ring[0], upper=ring[1])
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("ring", [(90, 99), (0, 100)], ids=str)
def test_same_bits_on_any_number_of_threads_and_in_every_run(ring):
    with torch_threads(1):
        expected = run(ring)
    for threads in (1, 2, 4, *[2] * 17):
        with torch_threads(threads):
            assert all(map(torch.equal, run(ring), expected))


def test_other_rows_of_the_batch_do_not_change_a_row():
    query, keys = query_and_keys("unit", 300, 5000, 16, torch.float32)
    losses = ring_info_nce(query, query.flip(0), keys, lower=50, upper=90, reduction="none")
    some = torch.tensor([0, 3, 128, 257, 299])
    alone = ring_info_nce(query[some], query.flip(0)[some], keys, lower=50, upper=90, reduction="none")
    assert torch.equal(alone, losses[some])


def test_inputs_are_not_written():
    query, keys = query_and_keys("unit", 4, 500, 6, torch.float32)
    leaves = [query.requires_grad_(), query.detach().clone().requires_grad_(), keys.requires_grad_()]
    before = [leaf.detach().clone() for leaf in leaves]
    ring_info_nce(*leaves, lower=10, upper=90).backward()
    assert all(torch.equal(leaf.detach(), copy) for leaf, copy in zip(leaves, before, strict=True))


SHAPES = ((70, 6000, 40), (3, 5000, 7))


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_other_instruction_sets(isa, tmp_path):
    """The kernels that this machine would not choose, where it can run them."""
    code = """
import sys, torch
from ring.test_info_nce import RINGS, SHAPES, run
results = [run(ring, shape) for ring in RINGS for shape in SHAPES]
torch.save((torch.ops.iecl_fast._instruction_set(), results), sys.argv[1])
"""
    environment = {**os.environ, "IECL_FAST_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, tmp_path / "results.pt"], check=True, env=environment)
    used, results = torch.load(tmp_path / "results.pt")
    if used != isa:
        pytest.skip(f"this machine has no {isa}")
    expected = [run(ring, shape) for ring in RINGS for shape in SHAPES]
    for result, wanted in zip(results, expected):
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-6)


def test_keys_without_gradient_may_be_overwritten_before_the_backward_pass():
    query, positive_key, keys = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8), torch.randn(50, 8)
    exclude = torch.arange(4)
    options = {"lower": 10, "upper": 90, "exclude": exclude}
    (wanted,) = torch.autograd.grad(ring_info_nce(query, positive_key, keys, **options), query)
    loss = ring_info_nce(query, positive_key, keys, **options)
    keys[:4] = positive_key  # MoCo enqueues before its caller's loss.backward()
    exclude += 1
    (gradient,) = torch.autograd.grad(loss, query)
    assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("pattern", [0x7FC00000, 0x7FC00001, 0x7F800001, -0x1])
@pytest.mark.parametrize("num_keys", [300, 6000])
def test_a_nan_of_any_bits_reaches_all_results(pattern, num_keys):
    query, keys = query_and_keys("unit", 4, num_keys, 8, torch.float32)
    keys[3] = torch.tensor(pattern, dtype=torch.int32).view(torch.float32)
    leaves = [query.requires_grad_(), keys.requires_grad_()]
    loss = ring_info_nce(leaves[0], query.detach(), leaves[1])
    query_gradient, keys_gradient = torch.autograd.grad(loss, leaves)
    assert loss.isnan() and query_gradient.isnan().all() and keys_gradient.isnan().all()
