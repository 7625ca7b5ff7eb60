"""What torch asks of an operator: schema, fakes, autograd, compilation."""

import subprocess
import sys

import pytest
import torch

from iecl_fast import ring_info_nce, ring_sample
from ring.cases import DTYPES, query_and_keys
from ring.loss_checks import check_autocast

operators = torch.ops.iecl_fast


@pytest.fixture(autouse=True)
def operators_may_leave_memory_uninitialised(poisoned_memory):
    torch.use_deterministic_algorithms(False)  # torch.compile cannot trace the filling


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 60, 6), (0, 60, 6), (5, 5000, 3)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck(dtype, shape, transposed):
    query, keys = query_and_keys("unit", *shape, dtype)
    keys = keys.T.contiguous().T if transposed else keys
    query.requires_grad_()
    keys.requires_grad_()
    positive_key = query.detach().clone().requires_grad_()
    temperature = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    exclude = torch.arange(shape[0])
    uniform = torch.rand(shape[0], 7, dtype=torch.float64)
    for own in (None, exclude):
        torch.library.opcheck(operators.ring_sample, (query, keys, 10.0, 90.0, own, None, True))
        torch.library.opcheck(operators.ring_sample, (query, keys, 10.0, 90.0, own, uniform, True))
        torch.library.opcheck(operators.ring_info_nce, (query, positive_key, keys, temperature, 10.0, 90.0, own, True))
    torch.library.opcheck(operators.ring_sample, (query.detach(), keys.detach(), 10.0, 90.0, None, None, False))
    loss, log_denominator, _ = operators.ring_info_nce(
        query.detach(), positive_key.detach(), keys.detach(), temperature.detach(), 10.0, 90.0, None, False
    )
    torch.library.opcheck(
        operators.ring_info_nce_keys_gradient,
        (query.detach(), keys.detach(), temperature.detach(), 10.0, 90.0, None, log_denominator, torch.ones_like(loss)),
    )
    values, indices = operators.ring_sample(query.detach(), keys.detach(), 10.0, 90.0, None, None, True)
    torch.library.opcheck(operators.ring_sample_query_gradient, (values, indices, keys.detach()))
    torch.library.opcheck(operators.ring_sample_keys_gradient, (values, indices, query.detach(), shape[1]))


def test_loss_compiles_without_a_graph_break():
    query, keys = query_and_keys("unit", 6, 500, 8, torch.float32)
    positive_key = query.flip(0)

    def loss(query, temperature):
        return ring_info_nce(query * 2, positive_key, keys, lower=20, upper=99, temperature=temperature)

    compiled = torch.compile(loss, fullgraph=True)
    results = []
    for function in (compiled, loss):
        leaves = [query.clone().requires_grad_(), torch.tensor(0.3, requires_grad=True)]
        value = function(*leaves)
        results.append([value.detach(), *torch.autograd.grad(value, leaves)])
    torch.testing.assert_close(*results)


def test_sample_compiles_without_a_graph_break():
    query, keys = query_and_keys("unit", 6, 500, 8, torch.float32)
    compiled = torch.compile(lambda q, k: ring_sample(q, k, 50, 90).square().sum(), fullgraph=True)
    leaves = [query.clone().requires_grad_() for _ in range(2)]
    compiled(leaves[0], keys).backward()
    ring_sample(leaves[1], keys, 50, 90).square().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


def test_compiled_code_still_says_what_is_wrong():
    query, keys = query_and_keys("unit", 6, 500, 8, torch.float32)
    compiled = torch.compile(lambda *args: ring_info_nce(*args, lower=0.1, upper=0.15), fullgraph=True)
    with pytest.raises(ValueError, match="keep no key"):
        compiled(query, query, keys)


def test_compiles_with_draws():
    query, keys = query_and_keys("unit", 6, 500, 8, torch.float32)
    compiled = torch.compile(lambda q, k: ring_sample(q, k, 50, 90, num_samples=300), fullgraph=True)
    values = compiled(query, keys)
    members = ring_sample(query, keys, 50, 90)
    assert values.shape == (6, 300)
    assert all(torch.isin(row, ring).all() for row, ring in zip(values, members, strict=True))


def test_second_derivative_is_refused():
    query, keys = query_and_keys("unit", 4, 60, 6, torch.float32)
    query.requires_grad_()
    for loss in (ring_info_nce(query, query.detach(), keys), ring_sample(query, keys, 10, 90).square().sum()):
        (gradient,) = torch.autograd.grad(loss, query, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            gradient.sum().backward()


def test_forward_mode_is_refused():
    query, keys = query_and_keys("unit", 4, 60, 6, torch.float32)
    for function in (lambda q: ring_info_nce(q, query, keys), lambda q: ring_sample(q, keys, 10, 90)):
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            torch.func.jvp(function, (query,), (query,))


def test_nothing_to_differentiate_saves_the_work():
    query, keys = query_and_keys("unit", 4, 60, 6, torch.float32)
    query.requires_grad_()
    with torch.no_grad():
        assert not ring_info_nce(query, query, keys).requires_grad
        assert not ring_sample(query, keys, 10, 90).requires_grad
    assert ring_info_nce(query, query, keys).requires_grad


def test_autocast_leaves_the_inputs_dtype():
    check_autocast()


def test_other_devices_are_served_by_the_reference(tmp_path):
    """The implementation for devices without kernels, called here with CPU tensors."""
    query, keys = query_and_keys("unit", 4, 300, 6, torch.float32)
    positive_key = query.flip(0)
    temperature = torch.tensor(0.2, dtype=torch.float64)
    code = """
import torch, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import iecl_fast.ring.ops as ops
    ops._implement("CPU", ops._by_reference("CPU"))  # replaces the kernels in this process
    query, positive_key, keys, temperature, exclude = torch.load(__import__("sys").argv[1])
    results = []
    for own in (None, exclude):
        for _ in range(2):
            leaves = [t.clone().requires_grad_() for t in (query, positive_key, keys, temperature)]
            from iecl_fast import ring_info_nce, ring_sample
            loss = ring_info_nce(*leaves[:3], lower=20, upper=80, temperature=leaves[3], exclude=own)
            values = ring_sample(leaves[0], leaves[2], 40, 90, exclude=own)
            results.append([loss.detach(), values.detach(),
                            *torch.autograd.grad(loss + values.square().sum(), leaves)])
    told = [str(w.message) for w in caught if "reference" in str(w.message)]
torch.save((results, told), __import__("sys").argv[1])
"""
    exclude = torch.tensor([0, 1, 2, 299])
    path = tmp_path / "inputs.pt"
    torch.save((query, positive_key, keys, temperature, exclude), path)
    subprocess.run([sys.executable, "-c", code, path], check=True)
    results, told = torch.load(path)
    for number, own in enumerate((None, None, exclude, exclude)):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, positive_key, keys, temperature)]
        loss = ring_info_nce(*leaves[:3], lower=20, upper=80, temperature=leaves[3], exclude=own)
        values = ring_sample(leaves[0], leaves[2], 40, 90, exclude=own)
        expected = [loss, values, *torch.autograd.grad(loss + values.square().sum(), leaves)]
        for result, wanted in zip(results[number], expected, strict=True):
            torch.testing.assert_close(result, wanted.detach(), rtol=1e-4, atol=1e-5)
    assert sorted(message.split()[0] for message in told) == ["iecl_fast.ring_info_nce", "iecl_fast.ring_sample"]
