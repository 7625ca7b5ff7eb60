"""The plans for CUDA devices, through the public functions: the sets bit for bit, losses and gradients by the rule."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accuracy import assert_as_accurate
from iecl_fast import ring_info_nce, ring_sample
from iecl_fast.ring import dispatch, plans, reference
from ring.cases import KINDS, layouts, query_and_keys
from ring.interpreter import cpu_sample, serve_cpu_tensors, small_tiles  # noqa: F401
from ring.loss_checks import check_accuracy, check_autocast, check_finite, check_infinite_query, check_tied_keys

DTYPES = (torch.float32, torch.float16)  # the interpreter's bfloat16 is not the GPU's
RINGS = ((0, 100), (90, 99), (0, 50), (55, 100))
EXACT = [kind for kind in KINDS if kind not in ("random", "unit", "huge")]

serve_cpu_tensors()


@pytest.fixture(autouse=True)
def plain_allocation(poisoned_memory):
    """new_empty is poisoned all the same; deterministic algorithms are no part of the plans."""


def bits(tensor):
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_set_as_the_reference_and_the_cpu(kind, dtype):
    query, keys = query_and_keys(kind, 3, 700, 24, dtype)
    for lower, upper in RINGS[1:]:
        values, indices = ring_sample(query, keys, lower, upper, return_indices=True)
        expected = reference.ring_sample(query, keys, lower, upper)
        assert torch.equal(indices, expected[1])
        assert torch.equal(values.nan_to_num(7), expected[0].to(dtype).nan_to_num(7))
        assert torch.equal(indices, cpu_sample(query, keys, lower, upper)[1])


def test_several_chunks_of_rows():
    query, keys = query_and_keys("ties", 20, 700, 8, torch.float32)
    assert torch.equal(ring_sample(query, keys, 90, 99), reference.ring_sample(query, keys, 90, 99)[0])


@pytest.mark.parametrize("kind", ["ties", "nan", "random"])
def test_excluded_key_and_draws(kind):
    query, keys = query_and_keys(kind, 4, 300, 12, torch.float32)
    exclude = torch.tensor([0, 299, 17, 150])
    uniform = torch.rand(4, 50, dtype=torch.float64)
    uniform[0, 0], uniform[0, 1] = 0, 1 - 2**-53
    for own in (None, exclude):
        _, indices = ring_sample(query, keys, 33.3, 66, exclude=own, return_indices=True)
        assert torch.equal(indices, cpu_sample(query, keys, 33.3, 66, own)[1])
    for own in (None, exclude, torch.tensor([3, -1, 299, -1])):
        operands = (query, keys, 33.3, 66.0, own, uniform, True)
        values, drawn = torch.ops.iecl_fast.ring_sample(*operands)
        expected = cpu_sample(query, keys, 33.3, 66, own, uniform)
        assert torch.equal(drawn, expected[1])
        assert torch.equal(bits(values).where(~values.isnan(), 0), bits(expected[0]).where(~values.isnan(), 0))


def test_a_key_index_out_of_range_is_refused():
    query, keys = query_and_keys("ties", 2, 60, 4, torch.float32)
    for bad in (60, -2):
        with pytest.raises(RuntimeError, match="exclude contains what is not allowed"):
            ring_sample(query, keys, 10, 90, exclude=torch.tensor([0, bad]))


def test_a_mixed_exclude_needs_rings_of_one_size():
    query, keys = query_and_keys("ties", 2, 60, 4, torch.float32)
    exclude = torch.tensor([0, -1])
    with pytest.raises(RuntimeError, match="another number of keys"):
        ring_sample(query, keys, 50, 100, exclude=exclude)
    ring_info_nce(query, query, keys, lower=50, upper=100, exclude=exclude)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("size", [(20, 700, 20), (3, 700, 40)], ids=str)
def test_as_accurate_as_plain_pytorch(ring, size, dtype):
    check_accuracy(ring, size, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_samples", [None, 50])
def test_gradients_of_samples(dtype, num_samples):
    query, keys = query_and_keys("unit", 6, 300, 20, dtype)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, keys)]
    values, indices = ring_sample(*leaves, 40, 90, num_samples=num_samples, return_indices=True)
    weights = torch.randn_like(values)
    result = torch.autograd.grad((values * weights).sum(), leaves)
    for leaf in leaves:
        leaf.grad = None
    plain = torch.autograd.grad(((leaves[0] @ leaves[1].T).gather(1, indices) * weights).sum(), leaves)
    double = [leaf.detach().double().requires_grad_() for leaf in leaves]
    truth = torch.autograd.grad(((double[0] @ double[1].T).gather(1, indices) * weights.double()).sum(), double)
    for got, true, simple in zip(result, truth, plain):
        assert_as_accurate(got, true, simple)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [1e-3, 0.07])
@pytest.mark.parametrize("ring", [(0, 100), (90, 99)], ids=str)
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_finite_at_any_temperature(ring, temperature, dtype, spread):
    check_finite(ring, temperature, dtype, spread, n=4, k=500)


@pytest.mark.parametrize("kind", ["constant", "ties", "sorted", "signed_zeros"])
@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_tied_keys(kind, ring):
    check_tied_keys(kind, ring, n=4, k=700)


def test_infinite_and_nan_members():
    query, keys = torch.ones(3, 2), torch.randn(600, 2)
    query[1], query[2] = -1, 0  # -inf, and 0 * inf = NaN
    keys[7] = torch.inf
    query.requires_grad_()

    def loss(lower, upper):
        return ring_info_nce(query, torch.zeros(3, 2), keys, lower=lower, upper=upper, reduction="none")

    everything = loss(0, 100)
    assert everything.tolist()[0] == math.inf and everything[1].isfinite() and everything[2].isnan()
    gradient = torch.autograd.grad(everything.sum(), query)[0]
    assert gradient[0].isnan().all() and gradient[1].isfinite().all() and gradient[2].isnan().all()
    inside = loss(1, 99)  # the worst key of each row is outside
    assert inside.isfinite().all()
    assert torch.autograd.grad(inside.sum(), query)[0].isfinite().all()


def test_an_infinite_query_leaves_the_other_rows_alone():
    check_infinite_query(n=20, k=300)


def test_a_nan_reaches_all_results_it_is_a_member_for():
    query, keys = query_and_keys("unit", 4, 300, 8, torch.float32)
    keys[3, 2] = torch.nan
    leaves = [query.requires_grad_(), keys.requires_grad_()]
    loss = ring_info_nce(leaves[0], query.detach(), leaves[1], reduction="none")
    gradients = torch.autograd.grad(loss.sum(), leaves)
    assert loss.isnan().all() and all(gradient.isnan().all() for gradient in gradients)
    below = ring_info_nce(leaves[0], query.detach(), leaves[1], upper=99, reduction="none")
    assert below.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(below.sum(), leaves))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_agree(dtype):
    query, keys = query_and_keys("ties", 3, 300, 20, dtype)
    strided_query = torch.stack([query, query + 1], dim=2)[:, :, 0]
    expected = ring_sample(query, keys, 20, 80)
    losses = set()
    for name, (stored, arguments) in layouts(keys).items():
        for some_query in (strided_query, query.T.contiguous().T):
            assert torch.equal(ring_sample(some_query, stored, 20, 80, **arguments), expected), name
            leaf = some_query.detach().requires_grad_()
            loss = ring_info_nce(leaf, query.flip(0), stored, lower=50, upper=90, **arguments)
            losses.add((loss.item(), *torch.autograd.grad(loss, leaf)[0].flatten().tolist()))
    assert len(losses) == 1


def test_excluded_keys():
    query, keys = query_and_keys("unit", 4, 300, 8, torch.float32)
    exclude = torch.tensor([0, -1, 299, 5])
    for ring in ((10, 90), (0, 100)):
        loss = ring_info_nce(
            query, query, keys, lower=ring[0], upper=ring[1], exclude=exclude, temperature=0.5, reduction="none"
        )
        expected = reference.ring_info_nce(query.double(), query.double(), keys.double(), 0.5, *ring, exclude)
        torch.testing.assert_close(loss, expected.float())


def test_no_queries():
    query = torch.empty(0, 4, requires_grad=True)
    keys = torch.randn(20, 4, requires_grad=True)
    loss = ring_info_nce(query, torch.empty(0, 4), keys, reduction="sum")
    loss.backward()
    assert loss == 0 and query.grad.shape == (0, 4) and torch.equal(keys.grad, torch.zeros(20, 4))
    values, indices = ring_sample(query, keys, 10, 90, return_indices=True)
    assert values.shape == indices.shape == (0, 16)
    assert ring_sample(query, keys, 10, 90, num_samples=5).shape == (0, 5)


def test_same_bits_in_every_run():
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        query, keys = query_and_keys("unit", 20, 700, 20, torch.float32)
        leaves = [query.requires_grad_(), query.detach().flip(0).requires_grad_(), keys.requires_grad_()]
        loss = ring_info_nce(*leaves, lower=20, upper=80)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    assert all(map(torch.equal, *results))


class NoSynchronisation(TorchDispatchMode):
    """Refuses what makes the host wait for a value on the device, or allocate by one."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_to_copy", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        if name in self.WAITS and not (name == "_to_copy" and "device" not in (kwargs or {})):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ring", [(0, 100), (40, 90)], ids=str)
def test_nothing_waits_for_the_device(ring):
    """Else a CUDA graph could not capture it."""
    query, keys = query_and_keys("unit", 4, 300, 8, torch.float32)
    temperature = torch.tensor(0.2, dtype=torch.float64)
    exclude = torch.arange(4)
    operators = {name: plan for name, plan in dispatch.with_plans(dict.fromkeys(PLANS)).items()}
    with NoSynchronisation():
        loss, log_denominator, _ = operators["ring_info_nce"](
            query, query, keys, temperature, *map(float, ring), exclude, True
        )
        operators["ring_info_nce_keys_gradient"](
            query, keys, temperature, *map(float, ring), exclude, log_denominator, loss
        )
        values, indices = operators["ring_sample"](query, keys, *map(float, ring), exclude, None, True)
        operators["ring_sample"](query, keys, *map(float, ring), exclude, torch.rand(4, 9).double(), True)
        operators["ring_sample_query_gradient"](values, indices, keys)
        operators["ring_sample_keys_gradient"](values, indices, query, 300)


PLANS = (
    "ring_sample",
    "ring_sample_query_gradient",
    "ring_sample_keys_gradient",
    "ring_info_nce",
    "ring_info_nce_keys_gradient",
)


def test_opcheck():
    query, keys = query_and_keys("unit", 4, 60, 6, torch.float32)
    leaves = [query.requires_grad_(), query.detach().clone().requires_grad_(), keys.T.contiguous().T.requires_grad_()]
    temperature = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    operators = torch.ops.iecl_fast
    for exclude in (None, torch.arange(4)):
        torch.library.opcheck(operators.ring_info_nce, (*leaves, temperature, 10.0, 90.0, exclude, True))
        torch.library.opcheck(operators.ring_sample, (leaves[0], leaves[2], 10.0, 90.0, exclude, None, True))
    values, indices = operators.ring_sample(query.detach(), keys.detach(), 10.0, 90.0, None, None, True)
    torch.library.opcheck(operators.ring_sample_query_gradient, (values, indices, keys.detach()))
    torch.library.opcheck(operators.ring_sample_keys_gradient, (values, indices, query.detach(), 60))


def test_compiles_without_a_graph_break():
    query, keys = query_and_keys("unit", 4, 200, 8, torch.float32)

    def loss(query):
        sampled = ring_sample(query, keys, 50, 90)
        return ring_info_nce(query * 2, query.detach(), keys, lower=20, upper=99) + sampled.square().mean()

    results = []
    for function in (torch.compile(loss, fullgraph=True, backend="aot_eager"), loss):
        leaf = query.clone().requires_grad_()
        value = function(leaf)
        results.append([value.detach(), *torch.autograd.grad(value, leaf)])
    torch.testing.assert_close(*results)


def test_autocast_changes_nothing():
    check_autocast()


def test_a_long_queue_takes_one_row_at_a_time(monkeypatch):
    monkeypatch.setattr(plans, "BUFFER_BYTES", 1)
    query, keys = query_and_keys("ties", 3, 300, 8, torch.float32)
    assert torch.equal(ring_sample(query, keys, 50, 90), reference.ring_sample(query, keys, 50, 90)[0])
    losses = ring_info_nce(query, query, keys, lower=50, upper=90, reduction="none")
    torch.testing.assert_close(losses, reference.ring_info_nce(query, query, keys, 0.07, 50, 90))
