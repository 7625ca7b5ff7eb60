"""SAIB's operators on a CUDA device, where there is one."""

import pytest
import torch
from triton_cases import NAMES, Case, assert_accurate, problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BATCH, PATCH = True, False
SINGLE, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16

# Every tail tile and the split form, straight and scattered images, widths that fill tiles and that do not. Each costs
# the compilation of about a dozen kernels, so not every dtype and activation with each.
CASES = [
    Case((12, 3, 32, 32), 4, BATCH, HALF),
    Case((48, 3, 30, 30), 5, BATCH, BFLOAT, layout="sliced"),
    Case((7, 3, 32, 32), 4, PATCH, BFLOAT, "silu"),
    Case((64, 3, 32, 32), 4, BATCH, BFLOAT, layout="channels_last"),
    Case((96, 3, 16, 16), 4, BATCH, HALF, "silu"),
    Case((100, 3, 16, 32), 4, BATCH, BFLOAT, layout="transposed"),
    Case((128, 3, 128, 128), 8, BATCH, BFLOAT),
    Case((128, 3, 16, 16), 4, BATCH, HALF, layout="channels_last"),
    Case((192, 3, 16, 16), 4, BATCH, BFLOAT, positional=False),
    Case((5, 3, 28, 28), 7, PATCH, HALF, layout="channels_last"),
    Case((256, 3, 128, 128), 8, BATCH, BFLOAT),
    Case((250, 3, 12, 12), 3, BATCH, HALF, "silu", layout="sliced"),
    Case((3, 3, 64, 48), 16, PATCH, BFLOAT),
    Case((60, 3, 16, 16), 4, BATCH, SINGLE),
    Case((3, 3, 32, 32), 4, PATCH, SINGLE, "silu", layout="channels_last"),
    Case((40, 3, 32, 32), 4, BATCH, BFLOAT, "silu", "monotone"),
    Case((10, 3, 32, 32), 4, PATCH, SINGLE, "relu", "monotone"),
]


def on_gpu(case: Case):
    """The problem with the same strides there."""
    tensors, gradient = problem(case)

    def moved(own):
        empty = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device="cuda")
        return empty.copy_(own)

    return [None if own is None else moved(own) for own in tensors], moved(gradient)


def by_operator(case: Case, tensors, gradient) -> dict[str, torch.Tensor]:
    leaves = [None if own is None else own.detach().requires_grad_() for own in tensors]
    output, _ = torch.ops.iecl_fast.saib(*leaves, *case.options, True)
    output.backward(gradient)
    return {"output": output.detach(), **{name: own.grad for name, own in zip(NAMES, leaves) if own is not None}}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_accuracy_and_gradients(case):
    tensors, gradient = on_gpu(case)
    assert_accurate(by_operator(case, tensors, gradient), case, tensors, gradient)


def test_tf32_where_torch_uses_it():
    case = Case((256, 3, 16, 16), 4, BATCH, activation="silu")
    tensors, gradient = on_gpu(case)
    exact = by_operator(case, tensors, gradient)["output"]
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        rounded = by_operator(case, tensors, gradient)["output"]
    finally:
        matmul.fp32_precision = before
    assert 0 < (exact - rounded).abs().max() < 0.01 * exact.abs().max()


@pytest.mark.parametrize("shape", [(128, 3, 64, 64), (64, 3, 64, 64)], ids=str)
def test_same_bits_in_every_run(shape):
    case = Case(shape, 8, shape[0] == 128, torch.bfloat16, "silu")
    tensors, gradient = on_gpu(case)
    first, *rest = (by_operator(case, tensors, gradient) for _ in range(20))
    assert all(torch.equal(first[name], other[name]) for other in rest for name in first)


@pytest.mark.parametrize("pieces", [1, 5])
def test_backward_pass_in_pieces(pieces, monkeypatch):
    from iecl_fast.saib import triton_plan

    case = Case((128, 3, 64, 64), 4, BATCH, torch.bfloat16)
    tensors, gradient = on_gpu(case)
    monkeypatch.setattr(triton_plan, "units_at_once", lambda units, *_: max(4, units // pieces))
    assert_accurate(by_operator(case, tensors, gradient), case, tensors, gradient)


@pytest.mark.parametrize("channels_are_batch", [BATCH, PATCH])
def test_captures_into_a_graph(channels_are_batch):
    case = Case((64, 3, 32, 32), 4, channels_are_batch, torch.bfloat16)
    tensors, gradient = on_gpu(case)
    static = [own.clone() for own in tensors]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        by_operator(case, static, gradient)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = by_operator(case, static, gradient)
    for scale in (1, -1, 0.5):
        static[0].copy_(tensors[0] * scale)
        graph.replay()
        expected = by_operator(case, [tensors[0] * scale, *tensors[1:]], gradient)
        assert all(torch.equal(captured[name], expected[name]) for name in expected)


def test_no_synchronisation():
    case = Case((64, 3, 32, 32), 4, BATCH, torch.bfloat16)
    tensors, gradient = on_gpu(case)
    expected = by_operator(case, tensors, gradient)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = by_operator(case, tensors, gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(results[name], expected[name]) for name in expected)


def test_side_stream():
    case = Case((64, 3, 32, 32), 4, BATCH, torch.bfloat16)
    tensors, gradient = on_gpu(case)
    expected = by_operator(case, tensors, gradient)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        results = by_operator(case, tensors, gradient)
    side.synchronize()
    assert all(torch.equal(results[name], expected[name]) for name in expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_second_device():
    case = Case((64, 3, 32, 32), 4, BATCH, torch.bfloat16)
    tensors, gradient = on_gpu(case)
    expected = by_operator(case, tensors, gradient)
    results = by_operator(case, [own.to("cuda:1") for own in tensors], gradient.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(results[name].cpu(), expected[name].cpu()) for name in expected)


def test_memory_beside_the_plain_chain():
    """Forward and backward of what DESIGN 3.2 says, in plain PyTorch, takes well above what the operators take."""
    from iecl_fast.saib import reference

    case = Case((128, 3, 224, 224), 16, BATCH, torch.bfloat16)
    tensors, gradient = on_gpu(case)

    def peak(function) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function(*(own.detach().requires_grad_() for own in tensors), *case.options).backward(gradient)
        return torch.cuda.max_memory_allocated() - before

    own = peak(lambda *arguments: torch.ops.iecl_fast.saib(*arguments, True)[0])
    assert own < 0.6 * peak(reference.saib)
