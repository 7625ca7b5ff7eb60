"""Ahead-of-time compilation of CUDA sources for every architecture that setup.py builds for: what the kernels take."""

import ast
import hashlib
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from simt_build import CSRC, ROOT

needed = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
STATIC_SHARED_LIMIT = 48 << 10  # of a block, on every architecture
REGISTERS_OF_AN_SM = 64 << 10


@dataclass(frozen=True)
class Kernel:
    name: str  # mangled
    architecture: str
    registers: int
    stack: int
    spilled: int  # bytes, stores and loads
    shared: int


def _architectures() -> list[int]:
    """Those of setup.py, without what this nvcc does not know."""
    assignment = re.search(r"^ARCHITECTURES = (\(.*?\))$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    wanted = [int(name.replace(".", "")) for name in ast.literal_eval(assignment[1])]
    listed = subprocess.run(["nvcc", "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    known = {int(number) for number in re.findall(r"compute_(\d+)", listed)}
    return [number for number in wanted if number in known]


def _files(source: Path) -> set[Path]:
    """A source, and what it includes of csrc."""
    names = re.findall(r'^#include "(.+)"$', source.read_text(), re.MULTILINE)
    return {source}.union(*(_files(CSRC / name) for name in names))


def _report(source: Path) -> str:
    """What ptxas says of a source of csrc; kept as long as its contents are the same."""
    options = ["-std=c++20", "-O3", f"-I{CSRC}", "--threads=2", "--resource-usage"]
    options += [f"-gencode=arch=compute_{number},code=sm_{number}" for number in _architectures()]
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    contents = b"\0".join(path.read_bytes() for path in sorted(_files(source)))
    digest = hashlib.sha256(repr((options, version)).encode() + contents).hexdigest()[:16]
    folder = ROOT / "build" / "nvcc"
    report = folder / f"{source.stem}-{digest}.txt"
    if not report.exists():
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{source.stem}-{digest}.o"
        command = ["nvcc", *options, "-c", str(source), "-o", str(target)]
        report.write_text(subprocess.run(command, check=True, capture_output=True, text=True).stderr)
        target.unlink()
    return report.read_text()


def compile_kernels(source: str) -> list[Kernel]:
    """The kernels of a source, given by its path in csrc, once for each architecture."""
    pattern = (
        r"Compiling entry function '(\w+)' for '(sm_\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers(.*?)$"
    )
    kernels = []
    for found in re.finditer(pattern, _report(CSRC / source), re.DOTALL | re.MULTILINE):
        name, architecture, stack, stores, loads, registers, rest = found.groups()
        shared = re.search(r"(\d+) bytes smem", rest)
        kernels.append(
            Kernel(
                name,
                architecture,
                int(registers),
                int(stack),
                int(stores) + int(loads),
                int(shared[1]) if shared else 0,
            )
        )
    return kernels


def assert_fits(source: str, count: int, threads: int) -> None:
    """`count` kernels for each architecture: no spills, no local memory, and two blocks of `threads` at a time."""
    kernels = compile_kernels(source)
    assert len(kernels) == count * len(_architectures())
    for kernel in kernels:
        assert kernel.stack == kernel.spilled == 0, kernel
        assert 2 * kernel.registers * threads <= REGISTERS_OF_AN_SM, kernel
        assert kernel.shared <= STATIC_SHARED_LIMIT, kernel
