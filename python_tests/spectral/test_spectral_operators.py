"""The operators themselves: accuracy against float64, gradients, layouts, determinism, what torch.library asks for."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from accuracy import assert_as_accurate
from iecl_fast.spectral import reference
from torch_threads import torch_threads

spectral_norm = torch.ops.iecl_fast.spectral_norm
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [
    (64, 3, 7, 7),
    (5, 300),
    (130, 257),
    (3, 64, 3, 3),
    (1, 1),
    (700, 1030),
    (2, 3, 2, 2, 2),
    (1500, 7),
]
# One small layer's sigma is off by an ulp or exact by chance; only many of them are a measure.
MANY_SHAPES = SHAPES + [(2, 3, 2, 2, 2), (1, 1), (3, 4)] * 10


def problem(shapes=SHAPES, dtype=torch.float32, scale=1.0, channels_last=False):
    """Weights and flat vectors after two iterations: of random ones u . W v is all rounding error."""
    generator = torch.Generator().manual_seed(1)  # not the tests' own 0: slopes would equal weights
    weights, vectors = [], []
    for shape in shapes:
        weight = (torch.randn(shape, generator=generator) * scale).to(dtype)
        if channels_last and len(shape) >= 4:
            weight = weight.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
        u, v = (torch.randn(n, generator=generator).double() for n in (shape[0], weight[0].numel()))
        vectors += reference.power_iteration(weight.double(), u, v, 2, 1e-30)
        weights.append(weight)
    return weights, torch.cat(vectors).float()


def joined(tensors):
    """All layers in one, so that a layer that plain PyTorch hits exactly by chance is no measure."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def by_reference(weights, vectors, iterations, dtype, eps=1e-12):
    sizes = [n for weight in weights for n in (weight.shape[0], weight[0].numel())]
    pieces = vectors.to(dtype).split(sizes)
    results = [
        reference.spectral_norm(weight.to(dtype), u, v, iterations, eps)
        for weight, u, v in zip(weights, pieces[::2], pieces[1::2])
    ]
    normalised, u, v, sigma = zip(*results)
    return list(normalised), torch.cat([x for pair in zip(u, v) for x in pair]), torch.stack(sigma)


def gradients_by_reference(weights, vectors, slopes, dtype):
    leaves = [weight.detach().to(dtype).requires_grad_() for weight in weights]
    normalised, *_ = by_reference(leaves, vectors, 0, dtype)
    return torch.autograd.grad(normalised, leaves, [slope.to(dtype) for slope in slopes])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_as_accurate_as_plain_pytorch(iterations, dtype, channels_last):
    weights, vectors = problem(dtype=dtype, channels_last=channels_last)
    before = [weight.clone() for weight in weights], vectors.clone()
    normalised, new_vectors, sigma = spectral_norm(weights, vectors, iterations, 1e-12, True)
    plain, plain_vectors, plain_sigma = by_reference(weights, vectors, iterations, torch.float32)
    truth, true_vectors, true_sigma = by_reference(weights, vectors, iterations, torch.float64)
    assert_as_accurate(new_vectors, true_vectors, plain_vectors)
    assert_as_accurate(sigma, true_sigma, plain_sigma)
    assert_as_accurate(joined(normalised), joined(truth), joined(plain).to(dtype))
    assert all(got.dtype == dtype and got.stride() == weight.stride() for got, weight in zip(normalised, weights))
    assert all(map(torch.equal, weights, before[0])) and torch.equal(vectors, before[1])


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient(dtype, channels_last):
    weights, vectors = problem(MANY_SHAPES, dtype, channels_last=channels_last)
    leaves = [weight.clone().requires_grad_() for weight in weights]
    normalised, _, _ = spectral_norm(leaves, vectors, 0, 1e-12, True)
    slopes = [torch.randn_like(weight) for weight in weights]
    got = torch.autograd.grad(normalised, leaves, slopes)
    true, plain = (gradients_by_reference(weights, vectors, slopes, kind) for kind in (torch.float64, torch.float32))
    _, _, sigma = by_reference(weights, vectors, 0, torch.float64)

    def in_slopes(gradients):
        """Without the division by sigma: entries of one size, whichever layer they are of."""
        return joined([gradient.double() * scale for gradient, scale in zip(gradients, sigma)])

    assert_as_accurate(in_slopes(got), in_slopes(true), in_slopes([gradient.to(dtype) for gradient in plain]))


def test_gradient_of_a_single_weight_is_zero():
    """Divided by its own norm, a weight is 1 or -1 whatever it is: what is left of a difference of equals is error."""
    weights, vectors = problem([(1, 1)] * 200)
    leaves = [weight.clone().requires_grad_() for weight in weights]
    normalised, _, _ = spectral_norm(leaves, vectors, 0, 1e-12, True)
    slopes = [torch.randn_like(weight) for weight in weights]
    got = joined(torch.autograd.grad(normalised, leaves, slopes))
    assert got.count_nonzero() == 0


def test_gradcheck_in_double():
    weights, vectors = problem([(4, 3, 2, 2), (3, 5)])
    leaves = [weight.double().requires_grad_() for weight in weights]
    assert torch.autograd.gradcheck(lambda *w: spectral_norm(list(w), vectors.double(), 0, 1e-12, True)[0], leaves)


def test_gradients_of_any_stride():
    """`sum().backward()` hands over a gradient of stride 0, a transposed use one that is transposed."""
    weights, vectors = problem([(6, 4, 3, 3), (5, 7), (9, 7)])
    leaves = [weight.clone().requires_grad_() for weight in weights]
    normalised, _, _ = spectral_norm(leaves, vectors, 0, 1e-12, True)
    other = torch.randn(7, 5)
    (normalised[0].sum() + (normalised[1].T * other).sum()).backward()  # the third is not used
    expected = gradients_by_reference(
        weights[:2], vectors[: 6 + 36 + 5 + 7], [torch.ones(6, 4, 3, 3), other.T], torch.float64
    )
    for leaf, true in zip(leaves, expected):
        torch.testing.assert_close(leaf.grad.double(), true, rtol=1e-5, atol=1e-6)
    assert leaves[2].grad is None


def test_frozen_weights_get_no_gradient():
    weights, vectors = problem([(6, 4), (5, 7)])
    weights[1].requires_grad_()
    normalised, _, sigma = spectral_norm(weights, vectors, 0, 1e-12, True)
    sum(one.square().sum() for one in normalised).backward()
    assert weights[0].grad is None and weights[1].grad is not None
    assert not sigma.requires_grad


def test_second_derivative_is_refused():
    weights, vectors = problem([(6, 4)])
    weights[0].requires_grad_()
    normalised, _, _ = spectral_norm(weights, vectors, 0, 1e-12, True)
    (gradient,) = torch.autograd.grad(normalised[0].square().sum(), weights, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("iterations", [0, 2])
def test_zero_weight_stays_zero_and_keeps_its_vectors(iterations):
    weights, vectors = problem([(6, 4), (5, 7)])
    weights[0].zero_()
    weights[0].requires_grad_()
    normalised, new_vectors, sigma = spectral_norm(weights, vectors, iterations, 1e-12, True)
    assert sigma[0] == 0 and (normalised[0] == 0).all() and normalised[1].isfinite().all()
    assert torch.equal(new_vectors[:10], vectors[:10])
    slope = torch.randn(6, 4)
    assert torch.equal(torch.autograd.grad(normalised[0], weights[0], slope)[0], slope)


def test_nan_stays_in_its_layer():
    weights, vectors = problem([(6, 4), (5, 7)])
    weights[0][2, 3] = torch.nan
    normalised, _, sigma = spectral_norm(weights, vectors, 1, 1e-12, True)
    assert normalised[0].isnan().all() and sigma[0].isnan()
    assert normalised[1].isfinite().all() and sigma[1].isfinite()


@pytest.mark.parametrize(("scale", "eps"), [(1e-17, 1e-30), (1e-13, 1e-12), (1e17, 1e-12)])
def test_weights_whose_squares_leave_the_range_of_floats(scale, eps):
    weights, vectors = problem(scale=scale)
    normalised, new_vectors, sigma = spectral_norm(weights, vectors, 2, eps, True)
    truth, true_vectors, true_sigma = by_reference(weights, vectors, 2, torch.float64, eps)
    torch.testing.assert_close(new_vectors.double(), true_vectors, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sigma.double(), true_sigma, rtol=1e-5, atol=0)
    for got, true in zip(normalised, truth):
        torch.testing.assert_close(got.double(), true, rtol=1e-5, atol=1e-6 * true.abs().max().item())


def test_every_float16_survives():
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16).reshape(256, 256)
    finite = torch.where(every.isfinite(), every, torch.zeros_like(every))
    for weight in (finite, finite.float().to(torch.bfloat16)):
        # u = e_0 / W[0, 1], v = e_1, so that sigma is one and nothing changes.
        vectors = torch.zeros(512)
        vectors[0], vectors[257] = 1 / weight[0, 1].double(), 1
        (out,), _, sigma = spectral_norm([weight], vectors, 0, 1e-12, True)
        assert sigma[0] == 1
        assert torch.equal(out.view(torch.int16), weight.view(torch.int16))
        (out,), _, sigma = spectral_norm([weight], vectors / 3, 0, 1e-12, True)
        assert torch.equal(out, (weight.float() / sigma).to(weight.dtype))


def test_same_bits_on_any_number_of_threads():
    weights, vectors = problem()
    slopes = [torch.randn_like(weight) for weight in weights]
    results = []
    for count in (1, 2, 2, 5):
        with torch_threads(count):
            normalised, new_vectors, sigma = spectral_norm(weights, vectors, 2, 1e-12, True)
            slope = torch.ops.iecl_fast.spectral_norm_gradient(slopes, weights, new_vectors, sigma)
        results.append([*normalised, new_vectors, sigma, *slope])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_lesser_instruction_sets(isa):
    """The kernels are chosen once in a process, so this takes a new one."""
    tests = "(as_accurate and not float16) or test_gradient or every_float16 or zero_weight"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", tests]
    run = subprocess.run(command, env={**os.environ, "IECL_FAST_ISA": isa}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:]


def test_no_layers_and_layers_of_nothing():
    normalised, vectors, sigma = spectral_norm([], torch.zeros(0), 1, 1e-12, True)
    assert (normalised, vectors.numel(), sigma.numel()) == ([], 0, 0)
    weights, vectors = problem([(5, 7)])
    vectors = torch.cat([torch.ones(3), vectors])
    (empty, other), _, sigma = spectral_norm([torch.zeros(3, 0), *weights], vectors, 1, 1e-12, True)
    assert empty.shape == (3, 0) and sigma[0] == 0 and other.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_opcheck(dtype):
    weights, vectors = problem([(6, 4, 3, 3), (5, 7), (2, 8)], dtype, channels_last=True)
    weights[2] = weights[2].T.contiguous().T
    vectors = vectors.to(torch.promote_types(dtype, torch.float32))
    leaves = [weight.requires_grad_() for weight in weights]
    for divide in (True, False):
        torch.library.opcheck(spectral_norm, (leaves, vectors, 1, 1e-12, divide))
    weights = [weight.detach() for weight in weights]
    slopes = [torch.randn_like(weight) for weight in weights]
    gradient = torch.ops.iecl_fast.spectral_norm_gradient
    torch.library.opcheck(gradient, (slopes, weights, vectors, torch.ones(3).to(vectors)))


def test_arguments_of_other_sizes_are_refused():
    weights, vectors = problem([(5, 7)])
    with pytest.raises(RuntimeError, match="vectors has the wrong dtype, layout or size"):
        torch.ops.iecl_fast._spectral_norm_cpu(weights, vectors[1:], 1, 1e-12, True)
    with pytest.raises(RuntimeError, match="contiguous or channels-last"):
        torch.ops.iecl_fast._spectral_norm_cpu([weights[0].T], vectors, 1, 1e-12, True)


@pytest.mark.parametrize("iterations", [1, 16, 100])
def test_estimates_are_from_below_and_converge(iterations, record_property):
    """Kaiming-initialised convolutions of a ResNet-18, from random vectors, against the exact norm."""
    torch.manual_seed(0)
    shapes = [(64, 3, 7, 7), (64, 64, 3, 3), (128, 64, 1, 1), (256, 128, 3, 3)]
    weights = [torch.nn.init.kaiming_normal_(torch.empty(shape)) for shape in shapes]
    vectors = torch.cat([F.normalize(torch.randn(n), dim=0) for w in weights for n in (w.shape[0], w[0].numel())])
    _, _, sigma = spectral_norm(weights, vectors, iterations, 1e-12, False)
    exact = torch.stack([torch.linalg.matrix_norm(weight.flatten(1).double(), ord=2) for weight in weights])
    error = (1 - sigma.double() / exact).max().item()
    record_property("largest relative error", error)
    assert (sigma <= exact * (1 + 1e-6)).all()
    assert error < {1: 0.5, 16: 0.05, 100: 0.01}[iterations]
