"""Which implementation serves which tensors; CUDA tensors are fake ones."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from iecl_fast import _library
from iecl_fast.saib import ops, plain

SHAPE, PATCH_SIZE = (6, 3, 8, 8), 4


def tensors(dtype, channels_are_batch, device="cuda"):
    d = SHAPE[0] if channels_are_batch else 3 * PATCH_SIZE**2
    shapes = SHAPE, (12, 16), (d, d, 1, 1), (2 * d, d, 3, 3), (2 * d, 2 * d, 1, 1), (d, 2 * d, 1, 1)
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_cuda_tensors_go_to_triton(dtype):
    pytest.importorskip("triton")
    with FakeTensorMode():
        x = tensors(dtype, True)[0]
    assert ops._implementation("cuda", x).__name__ == "iecl_fast.saib.triton"


def test_other_cuda_tensors_go_to_plain_pytorch(monkeypatch):
    with FakeTensorMode():
        double, single = (tensors(dtype, True)[0] for dtype in (torch.float64, torch.float32))
    assert ops._implementation("cuda", double) is plain
    monkeypatch.setattr(_library, "triton_missing", lambda device: "Triton is not installed")
    assert ops._implementation("cuda", single) is plain


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(_library, "find_spec", lambda name: None)
    assert _library.triton_missing.__wrapped__(torch.device("cuda")) == "Triton is not installed"
    _library.warn_reference.cache_clear()
    with pytest.warns(UserWarning, match="saib has no kernel for cuda"):
        _library.warn_reference("saib", "cuda")


@pytest.mark.parametrize("expansion", ["free", "monotone"])
@pytest.mark.parametrize("channels_are_batch", [True, False])
def test_fakes_of_cuda_tensors(channels_are_batch, expansion):
    """What torch.compile sees: shapes, dtypes and strides of outputs and gradients."""
    pytest.importorskip("triton")
    with FakeTensorMode():
        own = tensors(torch.bfloat16, channels_are_batch)
        own[0] = own[0].to(memory_format=torch.channels_last)
        if expansion == "monotone":
            own[5] = None
        options = PATCH_SIZE, channels_are_batch, "relu", expansion
        output, saved = torch.ops.iecl_fast.saib(*own, *options, True)
        needs = [one is not None for one in own]
        slopes = torch.ops.iecl_fast.saib_backward(output, *own, saved, *options, needs)
    assert output.shape == SHAPE and output.is_contiguous(memory_format=torch.channels_last)
    for slope, one in zip(slopes, (one for one in own if one is not None), strict=True):
        assert slope.shape == one.shape and slope.stride() == one.stride() and slope.dtype == one.dtype
    positions = 3 * 8 * 8 if channels_are_batch else 6 * 4
    assert len(saved) == (2 if expansion == "free" else 4) and all(len(rows) == positions for rows in saved)


def test_importing_the_package_does_not_load_triton():
    code = "import sys, iecl_fast; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
