"""Any set of layers: the operators against what their own results say in float64, a network against torch's."""

import copy
import io
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from fuzz import DTYPES, laid_out
from iecl_fast import remove_spectral_norm, spectral_norm
from iecl_fast.spectral import reference
from torch_threads import torch_threads

U = 2.0**-24
operators = torch.ops.iecl_fast


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with torch_threads(1):
        yield


@st.composite
def weights(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=5)))
    if draw(st.integers(0, 5)) == 0:
        shape = (draw(st.integers(1, 70)), draw(st.integers(1, 300)))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    weight = torch.randn(shape, generator=generator)
    kind = draw(st.sampled_from(["normal", "zeros", "one column", "equal rows"]))
    if kind == "zeros":
        weight = torch.zeros(shape)
    elif kind == "one column":
        weight.flatten(1)[:, 1:] = 0
    elif kind == "equal rows":
        weight = weight[:1].expand(shape)
    least, most = (-20, 10) if dtype != torch.float16 else (-2, 2)
    weight = (weight * 10.0 ** draw(st.integers(least, most))).to(dtype)
    if weight.dim() in (4, 5) and draw(st.booleans()):
        return weight.to(memory_format=torch.channels_last if weight.dim() == 4 else torch.channels_last_3d)
    return draw(laid_out(weight, expand=False))


def columns_of(weight):
    return weight.numel() // weight.shape[0]


def by_definition(weight, u, v, iterations, eps):
    """The next u and v in float64, and by how much errors of the sums grow on the way."""
    matrix, growth = weight.double().flatten(1), 1.0
    u, v = u.double(), v.double()
    for _ in range(iterations):
        for left, right in ((u, v), (v, u)):
            of = matrix if left is u else matrix.T
            product, size = of @ right, of.abs() @ right.abs()
            growth *= max(1.0, float(size.norm() / product.norm().clamp_min(1e-300)))
            if left is u:
                if not product.any():
                    return u, v, growth
                u = product / product.norm().clamp_min(eps)
                right = u
            else:
                v = (matrix.T @ u) / (matrix.T @ u).norm().clamp_min(eps)
    return u, v, growth


@given(st.data())
def test_operators(data):
    layers = data.draw(st.lists(weights(), min_size=1, max_size=5))
    iterations = data.draw(st.integers(0, 3))
    eps = data.draw(st.sampled_from([1e-12, 1e-4, 0.5]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    before = []
    for weight in layers:
        for size in (weight.shape[0], columns_of(weight)):
            before.append(nn.functional.normalize(torch.randn(size, generator=generator), dim=0))
    leaves = [weight.detach().requires_grad_() for weight in layers]
    normalised, vectors, sigmas = operators.spectral_norm(leaves, torch.cat(before), iterations, eps, True)
    pieces = vectors.split([len(vector) for vector in before])
    slopes = [torch.randn(weight.shape, generator=generator).to(weight.dtype) for weight in layers]
    slopes = [data.draw(laid_out(slope)) for slope in slopes]
    gradients = torch.autograd.grad(normalised, leaves, slopes)

    for i, weight in enumerate(layers):
        u, v, sigma = pieces[2 * i].double(), pieces[2 * i + 1].double(), sigmas[i].double()
        matrix, rows, columns = weight.double().flatten(1), weight.shape[0], columns_of(weight)
        terms = rows + columns + 16
        wanted_u, wanted_v, growth = by_definition(weight, before[2 * i], before[2 * i + 1], iterations, eps)
        if iterations == 0 or not matrix.any():
            assert torch.equal(pieces[2 * i], before[2 * i]) and torch.equal(pieces[2 * i + 1], before[2 * i + 1])
        allowed = 4 * iterations * terms * U * growth**2
        if allowed < 0.01:
            for got, wanted in ((u, wanted_u), (v, wanted_v)):
                assert (got - wanted).norm() <= allowed * max(1.0, float(wanted.norm())) + 2.0**-140

        size = float(u.abs() @ matrix.abs() @ v.abs())
        assert abs(sigma - u @ matrix @ v) <= terms * U * size + 2.0**-140
        divisor = sigma if sigma != 0 else torch.ones_like(sigma)
        own = torch.finfo(weight.dtype)
        result = matrix / divisor
        bound = result.abs() * (8 * U + own.eps) + own.smallest_normal
        counts = result.abs() < own.max / 2
        got = normalised[i].double().flatten(1)
        assert normalised[i].dtype == weight.dtype
        assert ((got - result).abs() <= bound)[counts].all()

        slope = slopes[i].double().flatten(1)
        inner = (slope * matrix).sum() / divisor if sigma != 0 else 0.0
        inner_size = (slope * matrix).abs().sum() / divisor.abs() if sigma != 0 else 0.0
        result = (slope - inner * torch.outer(u, v)) / divisor
        most = (slope.abs() + inner_size * torch.outer(u, v).abs()) / divisor.abs()
        bound = most * ((weight.numel() + 16) * U) + result.abs() * own.eps + own.smallest_normal
        # Vectors that eps kept short make sigma so small that the correction leaves float32's range.
        counts = (result.abs() < own.max / 2) & (most < 1e37) & (inner_size < 1e37 * float(divisor.abs()))
        assert ((gradients[i].double().flatten(1) - result).abs() <= bound)[counts].all()


@st.composite
def networks(draw):
    """A chain of layers, in float64: what is compared is when, not how exactly, u and v move."""
    widths = draw(st.lists(st.integers(1, 6), min_size=2, max_size=5))
    kind = draw(st.sampled_from(["linear", "convolution", "transposed"]))
    make = {
        "linear": nn.Linear,
        "convolution": lambda a, b: nn.Conv2d(a, b, draw(st.sampled_from([1, 3])), padding=1),
        "transposed": lambda a, b: nn.ConvTranspose2d(a, b, 2),
    }[kind]
    torch.manual_seed(draw(st.integers(0, 99)))
    layers = [make(a, b) for a, b in itertools.pairwise(widths)]
    if len(layers) > 1 and draw(st.booleans()):
        layers = [layers[0], nn.Sequential(*layers[1:])]  # a module around some of them
    shape = (2, widths[0]) if kind == "linear" else (2, widths[0], 3, 3)
    return nn.Sequential(*layers).double(), (nn.Linear, nn.Conv2d, nn.ConvTranspose2d), shape


STEPS = ["forward", "train", "eval", "no_grad", "backward", "change", "save and load", "copy"]


@given(networks(), st.integers(0, 2), st.lists(st.sampled_from(STEPS), max_size=12), st.integers(0, 99))
def test_a_network_through_any_steps(network, iterations, steps, seed):
    ours, kinds, shape = network
    theirs = copy.deepcopy(ours)
    torch.manual_seed(seed)
    spectral_norm(ours, layers=kinds, n_power_iterations=iterations)
    for module in [module for module in theirs.modules() if isinstance(module, kinds)]:
        # torch's cannot do without: it asks for one and never takes it.
        parametrizations.spectral_norm(module, n_power_iterations=max(iterations, 1))
        module.parametrizations.weight[0].n_power_iterations = iterations
    theirs.load_state_dict(ours.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for step in steps:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        if step in ("train", "eval"):
            ours.train(step == "train"), theirs.train(step == "train")
        elif step == "change":
            with torch.no_grad():
                for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                    parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
                    other.copy_(parameter)
        elif step == "save and load":
            file = io.BytesIO()
            torch.save(ours.state_dict(), file)
            file.seek(0)
            ours.load_state_dict(torch.load(file))
        elif step == "copy":
            ours = copy.deepcopy(ours)
        else:
            outputs = []
            for model in (ours, theirs):
                with torch.set_grad_enabled(step != "no_grad"):
                    outputs.append(model(x))
                if step == "backward":
                    model.zero_grad()
                    outputs[-1].square().sum().backward()
            torch.testing.assert_close(*outputs, rtol=1e-7, atol=1e-9)
            if step == "backward":
                for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                    scale = max(1.0, float(other.grad.abs().max()))
                    torch.testing.assert_close(parameter.grad / scale, other.grad / scale, rtol=1e-7, atol=1e-9)
    for (name, one), (other_name, other) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == other_name
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)
    weights = {name: ours.get_submodule(name).weight.detach() for name in _normalised(ours.eval())}
    remove_spectral_norm(ours)
    assert all(torch.equal(ours.get_submodule(name).weight, weight) for name, weight in weights.items())


def _normalised(model):
    return [name for name, module in model.named_modules() if hasattr(module, "parametrizations")]


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([0.0, 1e-30, 1.0]))
def test_definition_bounds_the_norm(rows, columns, scale):
    """With many iterations sigma is the largest singular value, so the result has norm 1, or 0."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows), dtype=torch.float64) * scale
    generator = torch.Generator().manual_seed(columns)
    u, v = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (rows, columns))
    result, *_ = reference.spectral_norm(weight, u / u.norm(), v / v.norm(), 300, 1e-60)
    norm = float(torch.linalg.matrix_norm(result, 2))
    assert math.isclose(norm, 1.0 if scale else 0.0, rel_tol=0.05)
