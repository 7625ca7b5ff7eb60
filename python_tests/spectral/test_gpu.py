"""The same promises on a CUDA device, where there is one."""

import pytest
import torch
from test_spectral_operators import DTYPES, by_reference, gradients_by_reference, joined, problem, spectral_norm

import iecl_fast
from accuracy import assert_as_accurate
from iecl_fast.spectral import SpectralNormHandle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(tensors):
    return [tensor.cuda() for tensor in tensors]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_accuracy_and_gradient(iterations, dtype, channels_last):
    weights, vectors = problem(dtype=dtype, channels_last=channels_last)
    leaves = [weight.cuda().requires_grad_() for weight in weights]
    normalised, new_vectors, sigma = spectral_norm(leaves, vectors.cuda(), iterations, 1e-12, True)
    plain, plain_vectors, plain_sigma = by_reference(weights, vectors, iterations, torch.float32)
    truth, true_vectors, true_sigma = by_reference(weights, vectors, iterations, torch.float64)
    assert_as_accurate(new_vectors.cpu(), true_vectors, plain_vectors)
    assert_as_accurate(sigma.cpu(), true_sigma, plain_sigma)
    assert_as_accurate(joined(normalised).detach().cpu(), joined(truth), joined(plain).to(dtype))
    assert all(one.stride() == weight.stride() for one, weight in zip(normalised, weights))

    slopes = [torch.randn_like(weight) for weight in weights]
    got = torch.autograd.grad(normalised, leaves, on_gpu(slopes))
    new = new_vectors.cpu()
    true, plain = (gradients_by_reference(weights, new, slopes, kind) for kind in (torch.float64, torch.float32))
    assert_as_accurate(joined(got).cpu(), joined(true), joined(plain).to(dtype))


def test_same_bits_in_every_run():
    weights, vectors = problem()
    weights, vectors = on_gpu(weights), vectors.cuda()
    first, *rest = (spectral_norm(weights, vectors, 2, 1e-12, True) for _ in range(20))
    for other in rest:
        assert torch.equal(joined(first[0]), joined(other[0])) and torch.equal(first[1], other[1])


def network():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 7), torch.nn.ReLU(), torch.nn.Conv2d(64, 32, 3)).cuda()
    iecl_fast.spectral_norm(model)
    return model


def test_captures_into_a_graph():
    model, same = network(), network()
    same.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 16, 16, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(x)
    torch.cuda.current_stream().wait_stream(side)
    model.load_state_dict(same.state_dict())
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        output = model(x)
    model.load_state_dict(same.state_dict())
    for _ in range(3):
        with torch.no_grad():
            for one, other in zip(model.parameters(), same.parameters()):
                one.mul_(1.1), other.mul_(1.1)
        graph.replay()
        torch.testing.assert_close(output, same(x).detach(), rtol=1e-3, atol=1e-4)
    mine, theirs = SpectralNormHandle(model).sigma(), SpectralNormHandle(same).sigma()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name])


def test_side_stream():
    weights, vectors = problem()
    expected = spectral_norm(on_gpu(weights), vectors.cuda(), 1, 1e-12, True)[1]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)  # the default stream is far ahead
        got = spectral_norm(on_gpu(weights), vectors.cuda(), 1, 1e-12, True)[1]
    side.synchronize()
    assert torch.equal(got, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_second_device_and_a_network_on_both():
    model = network()
    model[2].to("cuda:1")
    sigma = SpectralNormHandle(model).sigma()
    assert [one.device.index for one in sigma.values()] == [0, 1]
    for layer, one in zip((model[0], model[2]), sigma.values()):
        layer.eval()
        torch.testing.assert_close(layer.weight * one, layer.parametrizations.weight.original)
    assert torch.cuda.current_device() == 0
