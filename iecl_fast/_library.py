"""Loads the compiled operator libraries and says, once, what is missing.

Operators are defined by ``_cpu.so`` (always built) and ``_cuda.so`` (built where nvcc was found).
"""

import json
import sys
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

# Python run from the repository imports this package from the sources, which hold no libraries unless it was installed
# with -e. The installed package does.
_folders = [Path(__file__).parent, *(Path(entry) / "iecl_fast" for entry in sys.path)]
FOLDER = next((folder for folder in _folders if (folder / "_cpu.so").exists()), _folders[0])


@cache
def build_info() -> dict:
    """What setup.py wrote down about the build; empty if there was none."""
    path = FOLDER / "_build.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _load(name: str) -> str | None:
    """Load a library; None, or the reason why it is not there."""
    path = FOLDER / f"{name}.so"
    if not path.exists():
        return f"{path} was not built"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        built_with = build_info().get("torch", "an unknown torch")
        return f"{path} (built with {built_with}) does not load with torch {torch.__version__}: {error}"
    return None


_cpu_missing = _load("_cpu")
if _cpu_missing is not None:
    raise ImportError(
        f"iecl_fast has no CPU library: {_cpu_missing}. Reinstall it with the torch that is to be used: pip install ."
    )

# A CPU-only torch cannot load the CUDA library and does not need it.
cuda_missing: str | None = (
    _load("_cuda") if torch.version.cuda is not None else f"torch {torch.__version__} has no CUDA"
)


@cache
def triton_missing(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on a CUDA device, if so. Does not load Triton."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.version.hip is not None:
        return "this torch is built for ROCm, where the kernels were never tried"
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has compute capability < 8.0, which the kernels are made for"
    return None


@cache
def warn_reference(operator: str, device_type: str) -> None:
    """Say once per operator and device type that plain PyTorch does the work."""
    warnings.warn(
        f"iecl_fast.{operator} has no kernel for {device_type} tensors yet and uses its PyTorch reference there: "
        "correct, but slower. See `iecl-fast doctor`.",
        stacklevel=2,
    )
