"""Any images, weights and options of SAIB against the definition in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fuzz import DTYPES, laid_out, tensors, values
from iecl_fast import SAIB
from iecl_fast.saib import reference, saib
from saib.problems import Problem, output_and_gradients

NAMES = ("output", "x", "position", "w1", "w2", "w3", "w4")
KINDS = ("normal", "grid", "constant", "zeros")


@st.composite
def problems(draw, least_images=1):
    channels = draw(st.sampled_from(["batch", "patch"]))
    expansion = draw(st.sampled_from(["free", "monotone"]))
    activation = draw(st.sampled_from(["relu", "silu"])) if expansion == "free" else "relu"
    p = draw(st.integers(1, 5))
    n = draw(st.integers(least_images if channels == "patch" else 1, 9))
    sides = [p * draw(st.integers(1, 6)) for _ in range(2)]
    shape = (n, draw(st.integers(1, 3)), *sides)
    return Problem(channels, shape, p, activation, expansion, positional=draw(st.booleans()))


class Activations:
    """What an activation of the definition is applied to, in the order in which it is."""

    def __init__(self, monkeypatch, function):
        self.inputs = []

        def note(features):
            self.inputs.append(features.detach())
            return function(features)

        for name in reference.ACTIVATIONS:
            monkeypatch.setitem(reference.ACTIVATIONS, name, note)


@given(st.data())
def test_output_and_gradients(data):
    problem = data.draw(problems())
    dtype = data.draw(st.sampled_from([*DTYPES, torch.float64]))
    x, *weights = problem.tensors(data.draw(st.integers(0, 999)), dtype)
    x = data.draw(tensors(tuple(x.shape), dtype, KINDS, special=False))
    given_tensors = [x, *(None if weight is None else data.draw(laid_out(weight)) for weight in weights)]
    slope = data.draw(tensors(tuple(x.shape), dtype, KINDS, special=False))
    ours = output_and_gradients(problem.ours, given_tensors, gradient=slope)

    function = F.silu if problem.activation == "silu" else F.relu
    with pytest.MonkeyPatch.context() as monkeypatch:
        seen = Activations(monkeypatch, function)
        exact = output_and_gradients(problem.plain, given_tensors, torch.float64, slope)
    # With all terms positive nothing cancels: how large rounding errors may be, relative to what.
    sizes = [None if tensor is None else tensor.abs() for tensor in given_tensors]
    with pytest.MonkeyPatch.context() as monkeypatch:
        largest = Activations(monkeypatch, F.relu)
        size = output_and_gradients(problem.plain, sizes, torch.float64, slope.abs())
    wide = len(given_tensors[2])
    u = torch.finfo(dtype).eps / 2
    sums = max(u, 2.0**-53 if dtype == torch.float64 else 2.0**-24)  # what products are added up in, at the least
    share = 30 * wide * min(sums, 2.0**-24) + 30 * u
    if problem.activation == "silu":  # whose slope changes by half of what its argument does, and is up to 1.1
        share *= 2 * (1 + max(float(features.max()) for features in largest.inputs))
    # A sum too close to 0 may be on the other side of ReLU, and the gradients are others.
    edges = problem.activation == "relu" and any(
        ((z.abs() <= share * most.max()) & (most > 0)).any() for z, most in zip(seen.inputs, largest.inputs)
    )
    names = [name for name, tensor in zip(NAMES, ["output", *given_tensors]) if tensor is not None]
    for name, got, wanted, most in zip(names, ours, exact, size):
        assert got.dtype == dtype and got.shape == wanted.shape
        if name != "output" and edges:
            continue
        # The weights' gradients add up all positions.
        terms = 1 if name in ("output", "x") else 1 + x.numel() / wide * 2.0**-24 / u
        allowed = share * terms * most.max()
        assert (got.double() - wanted).abs().max() <= allowed, name


@given(st.data())
def test_only_what_is_asked_for(data):
    """Any of the tensors may want a gradient or not: the others' are the same bits."""
    problem = data.draw(problems())
    given_tensors = problem.tensors(data.draw(st.integers(0, 999)))
    wanted = [tensor is not None and data.draw(st.booleans()) for tensor in given_tensors]
    everything = output_and_gradients(problem.ours, given_tensors)
    leaves = [None if t is None else t.clone().requires_grad_(want) for t, want in zip(given_tensors, wanted)]
    output = problem.ours(*leaves)
    assert torch.equal(output, everything[0]) and output.requires_grad == any(wanted)
    if not any(wanted):
        return
    slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    chosen = [leaf for leaf, want in zip(leaves, wanted) if want]
    all_gradients = iter(everything[1:])
    expected = [next(all_gradients) for t in given_tensors if t is not None]
    present = [want for t, want in zip(given_tensors, wanted) if t is not None]
    expected = [gradient for gradient, want in zip(expected, present) if want]
    assert all(map(torch.equal, torch.autograd.grad(output, chosen, slope), expected))


@given(st.data())
def test_an_image_by_itself_is_left_alone_by_what_others_hold(data):
    problem = data.draw(problems(least_images=0).filter(lambda problem: problem.channels == "patch"))
    n = problem.shape[0]
    x, *weights = problem.tensors()
    wild = data.draw(values(tuple(x.shape), torch.float32))
    chosen = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool)
    mixed = torch.where(chosen[:, None, None, None], wild, x)
    assert torch.equal(problem.ours(mixed, *weights)[~chosen], problem.ours(x, *weights)[~chosen])


@given(st.data())
def test_module_is_its_blocks_in_a_row(data):
    problem = data.draw(problems())
    n, _, height, width = problem.shape
    cascade = data.draw(st.integers(1, 3))
    shape = (n, problem.patch_size, (height, width))
    arguments = (problem.channels, *shape, problem.activation, problem.expansion, cascade, problem.positional)
    torch.manual_seed(data.draw(st.integers(0, 99)))
    module = SAIB(*arguments)
    x = data.draw(tensors((n, 3, height, width), torch.float32, KINDS, special=False))
    expected = x
    blocks = [module, *module.further]
    for block in blocks:
        expected = saib(expected, block.position, block.w1, block.w2, block.w3, block.w4, **problem.options)
    assert len(blocks) == cascade and torch.equal(module(x), expected)
    again = SAIB(*arguments)
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(x), expected)
