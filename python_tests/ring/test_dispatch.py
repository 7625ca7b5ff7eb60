"""Which implementation serves CUDA tensors; the choice alone, on machines without such a device."""

import subprocess
import sys

import pytest
import torch

from iecl_fast import _library, doctor
from iecl_fast.ring import dispatch, ops, ring_ranks


@pytest.fixture(autouse=True)
def fresh_choice():
    _library.triton_missing.cache_clear()
    yield
    _library.triton_missing.cache_clear()


def without_triton(monkeypatch):
    original = _library.find_spec
    monkeypatch.setattr(_library, "find_spec", lambda name: None if name == "triton" else original(name))


def test_importing_the_package_imports_no_triton():
    code = "import sys, iecl_fast; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_triton_the_reference_serves(monkeypatch):
    without_triton(monkeypatch)
    assert "Triton is not installed" in dispatch.describe()["ring_info_nce"]
    assert "PyTorch reference: Triton is not installed" in doctor.report()
    query, keys = torch.randn(3, 4), torch.randn(40, 4)
    operators = dispatch.with_plans(ops._by_reference("cuda"))
    _library.warn_reference.cache_clear()
    with pytest.warns(UserWarning, match="ring_sample has no kernel for cuda tensors"):
        result = operators["ring_sample"](query, keys, 10.0, 90.0, None, None, True)
    expected = torch.ops.iecl_fast.ring_sample(query, keys, 10.0, 90.0, None, None, True)
    assert torch.equal(result[1], expected[1])


def test_an_old_device_is_served_by_the_reference(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old one")
    assert "an old one has compute capability < 8.0" in _library.triton_missing(torch.device("cuda", 0))


def test_without_the_cuda_library_triton_serves_alone(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "_kernels", object())
    monkeypatch.setattr(_library, "cuda_missing", "nvcc was not found")
    assert dispatch.library_missing() == "no CUDA library"
    assert dispatch.describe()["ring_sample"].endswith("selection in Triton: no CUDA library")


def test_ranks_without_looking_at_exclude():
    exclude = torch.tensor([0, -1, 99])
    assert dispatch.ranks_of_shapes(90, 99, 100, None, True) == [*ring_ranks(90, 99, 100), 0, 0]
    expected = [*ring_ranks(90, 99, 100), *ring_ranks(90, 99, 99)]
    assert dispatch.ranks_of_shapes(90, 99, 100, exclude, False) == expected
    with pytest.raises(RuntimeError, match=r"key indices -1\.\.99 are allowed"):
        dispatch.ranks_of_shapes(90, 99, 100, torch.tensor([100]), False)
    with pytest.raises(RuntimeError, match=r"0\.\.99 are allowed, -1 is not"):
        dispatch.ranks_of_shapes(50, 100, 100, exclude, True)
    with pytest.raises(ValueError, match="keep no key"):
        dispatch.ranks_of_shapes(0.1, 0.15, 100, exclude, True)
