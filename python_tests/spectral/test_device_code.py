"""The CUDA kernels without a GPU: run on the host by csrc/simt, and compiled ahead of time by nvcc."""

from pathlib import Path

import nvcc
import pytest
import torch
from simt_build import build_simt_module

from accuracy import assert_as_accurate
from iecl_fast.spectral import reference

HERE = Path(__file__).parent
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# rows, columns, channels (fewer than columns: channels-last), on both sides of a warp, a block, a chunk.
SHAPES = [(64, 27, 27), (7, 300, 300), (130, 257, 257), (3, 576, 64), (1, 1, 1), (40, 1030, 1030), (1100, 33, 33)]


@pytest.fixture(scope="module")
def simt():
    return build_simt_module("simt_spectral", HERE / "kernels.cpp", HERE / "bindings.cpp")


def bits(tensor):
    return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.int16).numpy()


def in_memory(matrix, channels):
    """A matrix (rows, columns) as it lies in memory, channels-last if there are fewer channels than columns."""
    rows, columns = matrix.shape
    return matrix.reshape(rows, channels, columns // channels).transpose(1, 2).reshape(rows, columns).contiguous()


def as_matrix(memory, channels):
    rows, columns = memory.shape
    return memory.reshape(rows, columns // channels, channels).transpose(1, 2).reshape(rows, columns)


def problem(shapes, dtype, scale=1.0):
    """Weights, and vectors after two iterations: of random ones u . W v is next to nothing, and all rounding error."""
    generator = torch.Generator().manual_seed(0)
    weights = [(torch.randn(r, c, generator=generator) * scale).to(dtype) for r, c, _ in shapes]
    vectors = torch.cat([torch.randn(n, generator=generator) for shape in shapes for n in shape[:2]])
    return weights, by_reference(weights, vectors, 2, torch.float64, eps=1e-30)[1].float()


def run(simt, weights, shapes, vectors, iterations, eps=1e-12, divide=True):
    memory = [in_memory(weight, shape[2]) for weight, shape in zip(weights, shapes)]
    out = [torch.full_like(weight, torch.nan) for weight in memory] if divide else []
    vectors, sigma = vectors.clone(), torch.full((len(shapes),), torch.nan)
    simt.norm(
        [bits(w) for w in memory],
        shapes,
        DTYPES.index(weights[0].dtype),
        iterations,
        eps,
        vectors.numpy(),
        sigma.numpy(),
        [bits(o) for o in out],
    )
    return [as_matrix(o, shape[2]) for o, shape in zip(out, shapes)], vectors, sigma


def run_gradient(simt, gradients, weights, shapes, vectors, sigma):
    memory = [[in_memory(tensor, shape[2]) for tensor, shape in zip(side, shapes)] for side in (gradients, weights)]
    out = [torch.full_like(weight, torch.nan) for weight in memory[1]]
    arrays = [[bits(tensor) for tensor in side] for side in memory]
    dtype = DTYPES.index(weights[0].dtype)
    simt.norm_gradient(*arrays, shapes, dtype, vectors.numpy(), sigma.numpy(), [bits(o) for o in out])
    return [as_matrix(o, shape[2]) for o, shape in zip(out, shapes)]


def joined(matrices):
    """All layers in one, so that a layer that plain PyTorch hits exactly by chance is no measure."""
    return torch.cat([matrix.flatten() for matrix in matrices])


def by_reference(weights, vectors, iterations, dtype, eps=1e-12):
    """Normalised weights, new vectors and sigma in plain PyTorch of one dtype."""
    pieces = vectors.to(dtype).split([n for weight in weights for n in weight.shape])
    results = [
        reference.spectral_norm(weight.to(dtype), u, v, iterations, eps)
        for weight, u, v in zip(weights, pieces[::2], pieces[1::2])
    ]
    normalised, u, v, sigma = zip(*results)
    return list(normalised), torch.cat([x for pair in zip(u, v) for x in pair]), torch.stack(sigma)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_accuracy(simt, dtype, iterations):
    simt.set_seed(iterations)
    weights, vectors = problem(SHAPES, dtype)
    normalised, new_vectors, sigma = run(simt, weights, SHAPES, vectors, iterations)
    plain, plain_vectors, plain_sigma = by_reference(weights, vectors, iterations, torch.float32)
    truth, true_vectors, true_sigma = by_reference(weights, vectors, iterations, torch.float64)
    assert_as_accurate(new_vectors, true_vectors, plain_vectors)
    assert_as_accurate(sigma, true_sigma, plain_sigma)
    assert_as_accurate(joined(normalised), joined(truth), joined(plain).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient(simt, dtype):
    weights, vectors = problem(SHAPES, dtype)
    generator = torch.Generator().manual_seed(1)
    slopes = [torch.randn(weight.shape, generator=generator).to(dtype) for weight in weights]
    got = run_gradient(simt, slopes, weights, SHAPES, vectors, run(simt, weights, SHAPES, vectors, 0)[2])

    def by_autograd(dtype):
        leaves = [weight.to(dtype).requires_grad_() for weight in weights]
        normalised, *_ = by_reference(leaves, vectors, 0, dtype)
        return torch.autograd.grad(normalised, leaves, [slope.to(dtype) for slope in slopes])

    plain, truth = by_autograd(torch.float32), by_autograd(torch.float64)
    assert_as_accurate(joined(got), joined(truth), joined(plain).to(dtype))


@pytest.mark.parametrize(("scale", "eps"), [(1e-17, 1e-30), (1e-13, 1e-12), (1e17, 1e-12)])
def test_weights_whose_squares_leave_the_range_of_floats(simt, scale, eps):
    shapes = SHAPES[:3]
    weights, vectors = problem(shapes, torch.float32, scale=scale)
    normalised, new_vectors, sigma = run(simt, weights, shapes, vectors, 2, eps)
    truth, true_vectors, true_sigma = by_reference(weights, vectors, 2, torch.float64, eps)
    torch.testing.assert_close(new_vectors.double(), true_vectors, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sigma.double(), true_sigma, rtol=1e-5, atol=0)
    for got, true in zip(normalised, truth):
        torch.testing.assert_close(got.double(), true, rtol=1e-5, atol=1e-6 * true.abs().max().item())


def test_zero_weights(simt):
    shapes = SHAPES[:3]
    weights, vectors = problem(shapes, torch.float32)
    weights[1].zero_()
    normalised, new_vectors, sigma = run(simt, weights, shapes, vectors, 2)
    _, expected_vectors, _ = by_reference(weights, vectors, 2, torch.float32)
    assert sigma[1] == 0 and (normalised[1] == 0).all()
    torch.testing.assert_close(new_vectors, expected_vectors, rtol=0, atol=1e-6)
    gradients = [torch.randn_like(weight) for weight in weights]
    assert torch.equal(run_gradient(simt, gradients, weights, shapes, new_vectors, sigma)[1], gradients[1])


def test_results_are_the_same_bits_in_any_order_of_threads(simt):
    weights, vectors = problem(SHAPES[:4], torch.float32)
    results = []
    for seed in (0, 1):
        simt.set_seed(seed)
        results.append(run(simt, weights, SHAPES[:4], vectors, 1))
    (first, *rest), (second, *other) = results
    assert all(torch.equal(a, b) for a, b in zip((*first, *rest), (*second, *other)))


def test_launches_do_not_grow_with_layers(simt):
    """But for the table, which is written in slices (of 2 layers here, of hundreds under nvcc)."""
    counts = []
    for layers in (2, 6):
        shapes = [(8, 8, 8)] * layers
        weights, vectors = problem(shapes, torch.float32)
        simt.take_counters()
        run(simt, weights, shapes, vectors, 1)
        counts.append(simt.take_counters().launches - layers // 2)
    assert counts == [4, 4]


def test_traffic_is_what_the_header_says(simt):
    shapes = [(512, 2048, 2048)]
    weights, vectors = problem(shapes, torch.float32)
    size = weights[0].nbytes
    simt.take_counters()
    run(simt, weights, shapes, vectors, 1, divide=False)
    counters = simt.take_counters()
    # W twice, v for each row, and the table's entry for each thread (of which a GPU makes one access per warp); the
    # parts of chunks of 16 rows are written, read, and in the end one of them is written again.
    assert 3 * size < counters.global_load_bytes < 3.3 * size
    assert counters.global_store_bytes < size / 14
    simt.take_counters()
    run(simt, weights, shapes, vectors, 0)
    counters = simt.take_counters()
    assert 3 * size < counters.global_load_bytes < 3.4 * size  # W, v for each row, and W again to be divided
    assert size < counters.global_store_bytes < 1.02 * size
    assert counters.atomics == 0


@nvcc.needed
def test_compiles_without_spills():
    nvcc.assert_fits("spectral/norm_cuda.cu", count=8, threads=256)
