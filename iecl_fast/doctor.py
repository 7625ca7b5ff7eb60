"""What was built, what each operator uses on each device, and why."""

import platform
from importlib import metadata

import torch

from iecl_fast import _library
from iecl_fast.ring import dispatch


def report() -> str:
    """A few lines of text for a terminal or a bug report."""
    build = _library.build_info()
    instruction_set = torch.ops.iecl_fast._instruction_set()
    lines = [
        f"iecl_fast {metadata.version('iecl_fast')}, Python {platform.python_version()}, {platform.machine()}",
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; built with torch {build.get('torch', '?')}",
        f"CPU library   loaded, uses {instruction_set} here",
        f"CUDA library  {_cuda_library(build)}",
        f"CUDA device   {_cuda_device()}",
        f"torchvision   {torchvision_fault() or _version('torchvision')}",
        f"Triton        {_version('triton')}",
        "",
        "operator        cpu                 cuda",
    ]
    on_cuda = dispatch.describe()
    on_cuda["spectral_norm"] = "CUDA C++" if _library.cuda_missing is None else "PyTorch reference: no CUDA library"
    missing = _library.triton_missing(torch.device("cuda"))
    on_cuda["saib"] = "Triton" if missing is None else f"PyTorch reference: {missing}"
    lines += [f"{operator:<15} C++ ({instruction_set})".ljust(36) + form for operator, form in on_cuda.items()]
    return "\n".join(lines)


def torchvision_fault() -> str | None:
    """Why torchvision cannot be used here, if so."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:  # RuntimeError: its operators are those of another torch
        return f"torchvision {_version('torchvision')} does not load with torch {torch.__version__}: {error}"
    return None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cuda_library(build: dict) -> str:
    if build.get("cuda_missing"):
        return f"not built: {build['cuda_missing']}"
    if _library.cuda_missing is not None:
        return f"not loaded: {_library.cuda_missing}"
    toolkit = torch.ops.iecl_fast.cuda_toolkit_version()
    return f"loaded, CUDA {toolkit // 1000}.{toolkit % 1000 // 10}, for {build['architectures']}"


def _cuda_device() -> str:
    if not torch.cuda.is_available():
        return "none"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
