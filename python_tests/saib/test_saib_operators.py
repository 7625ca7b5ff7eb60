"""What torch asks of an operator: schema, fakes, autograd, autocast, compilation."""

import subprocess
import sys

import pytest
import torch

from saib.problems import Problem, output_and_gradients

operators = torch.ops.iecl_fast
FORMS = [
    Problem("batch", (6, 3, 8, 12), 4),
    Problem("patch", (5, 3, 8, 12), 2, "silu"),
    Problem("batch", (21, 3, 8, 12), 4, "silu", positional=False),
    Problem("patch", (5, 3, 8, 12), 4, expansion="monotone"),
]


@pytest.fixture(autouse=True)
def operators_may_leave_memory_uninitialised(poisoned_memory):
    torch.use_deterministic_algorithms(False)  # torch.compile cannot trace the filling


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("problem", FORMS, ids=str)
def test_opcheck(problem, dtype):
    options = problem.operator_options
    tensors = problem.tensors(dtype=dtype)
    output, saved = operators.saib(*tensors, *options, True)
    needs = [True, problem.positional, False, True, True, problem.expansion == "free"]
    torch.library.opcheck(operators.saib_backward, (output, *tensors, saved, *options, needs))
    torch.library.opcheck(operators.saib, (*tensors, *options, False))
    for memory_format in (torch.contiguous_format, torch.channels_last):
        image = tensors[0].clone(memory_format=memory_format)
        leaves = [None if t is None else t.requires_grad_() for t in (image, *tensors[1:])]
        torch.library.opcheck(operators.saib, (*leaves, *options, True))


def test_opcheck_without_images():
    problem = Problem("patch", (0, 3, 8, 12), 4)
    leaves = [tensor.requires_grad_() for tensor in problem.tensors()]
    torch.library.opcheck(operators.saib, (*leaves, *problem.operator_options, True))


@pytest.mark.parametrize("problem", FORMS, ids=str)
def test_compiles_without_a_graph_break(problem):
    tensors = problem.tensors()
    compiled = torch.compile(lambda *leaves: problem.ours(*leaves) * 2, fullgraph=True)
    results = [output_and_gradients(f, tensors) for f in (compiled, lambda *leaves: problem.ours(*leaves) * 2)]
    for compiled_result, result in zip(*results):
        assert torch.equal(compiled_result, result)


def test_compiles_under_autocast():
    problem = FORMS[0]

    def function(*leaves):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return problem.ours(*leaves)

    results = [output_and_gradients(f, problem.tensors()) for f in (torch.compile(function, fullgraph=True), function)]
    assert results[0][0].dtype == torch.bfloat16
    for compiled_result, result in zip(*results):
        assert torch.equal(compiled_result, result)


def test_compiled_code_takes_any_batch_size():
    problem = Problem("patch", (5, 3, 8, 12), 4)
    compiled = torch.compile(problem.ours, fullgraph=True, dynamic=True)
    _, *weights = problem.tensors()
    for n in (5, 2, 9):
        x = torch.randn(n, 3, 8, 12)
        assert torch.equal(compiled(x, *weights), problem.ours(x, *weights))


def test_compiled_code_still_says_what_is_wrong():
    problem = FORMS[0]
    x, *weights = problem.tensors()
    with pytest.raises(Exception, match="multiples of patch_size = 4"):
        torch.compile(problem.ours, fullgraph=True)(x[..., :9], *weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("problem", FORMS, ids=str)
def test_autocast_computes_in_its_dtype_like_a_convolution(problem, dtype):
    tensors = problem.tensors()

    def inside(*leaves):
        with torch.autocast("cpu", dtype=dtype):
            return problem.ours(*leaves)

    def cast(*leaves):
        return problem.ours(*(None if leaf is None else leaf.to(dtype) for leaf in leaves))

    results, expected = (output_and_gradients(f, tensors) for f in (inside, cast))
    assert results[0].dtype == dtype
    assert all(gradient.dtype == torch.float32 for gradient in results[1:])
    assert all(map(torch.equal, results, expected))


def test_autocast_takes_mixed_dtypes_and_leaves_float64_alone():
    problem = FORMS[0]
    x, *weights = problem.tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(problem.ours(x.bfloat16(), *weights), problem.ours(x, *weights))
        doubles = problem.tensors(dtype=torch.float64)
        assert problem.ours(*doubles).dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False), pytest.raises(TypeError, match="one dtype"):
        problem.ours(x.bfloat16(), *weights)


def test_backward_under_autocast_keeps_the_precision_of_the_forward_pass():
    problem = FORMS[0]
    leaves = [tensor.requires_grad_() for tensor in problem.tensors()]
    expected = torch.autograd.grad(problem.ours(*leaves).square().sum(), leaves)
    loss = problem.ours(*leaves).square().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, torch.autograd.grad(loss, leaves), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_second_derivative_is_refused(dtype):
    problem = FORMS[0]
    leaves = [tensor.requires_grad_() for tensor in problem.tensors(dtype=dtype)]
    gradients = torch.autograd.grad(problem.ours(*leaves).float().square().sum(), leaves, create_graph=True)
    for gradient in gradients:
        with pytest.raises(RuntimeError, match="no second derivative"):
            gradient.float().sum().backward(retain_graph=True)


def test_forward_mode_is_refused():
    problem = FORMS[0]
    x, *weights = problem.tensors()
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda image: problem.ours(image, *weights), (x,), (x,))


def test_devices_without_kernels_are_told_once(tmp_path):
    """The implementation for other devices, called here with CPU tensors."""
    path = tmp_path / "results.pt"
    code = """
import sys, torch, warnings
from iecl_fast.saib import ops
sys.path.insert(0, "python_tests")
from saib.problems import Problem, output_and_gradients
ops._implement("mps", key="CPU")  # replaces the kernels in this process
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    problem = Problem("batch", (6, 3, 8, 12), 4)
    results = [output_and_gradients(problem.ours, problem.tensors()) for _ in range(2)]
torch.save((results, [str(w.message) for w in caught if "reference" in str(w.message)]), sys.argv[1])
"""
    subprocess.run([sys.executable, "-c", code, path], check=True)
    results, told = torch.load(path)
    problem = FORMS[0]
    expected = output_and_gradients(problem.plain, problem.tensors())
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert len(told) == 1 and told[0].startswith("iecl_fast.saib has no kernel for mps tensors")
