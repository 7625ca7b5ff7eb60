"""Triton launches compiled for GPUs that are not there: what the launchers launch, nothing written down twice."""

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that a block may have, by compute capability
MATRIX_INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Launch(NamedTuple):
    """One kernel with all that decides on its code; hashable, so that equal ones are compiled once."""

    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, object], ...]
    multiples_of_16: tuple[str, ...]
    warps: int
    stages: int
    registers: int | None  # most that a thread may have, where the launcher says so

    def __str__(self):
        constants = ",".join(f"{name}={value}" for name, value in self.constants if name.isupper())
        types = ",".join(sorted({kind[1:] for _, kind in self.signature if kind.startswith("*")}))
        return f"{self.kernel.__name__}[{constants},{types}]"


class Call(NamedTuple):
    """A launch with what decides on how often its code runs."""

    launch: Launch
    grid: tuple[int, ...]
    numbers: tuple[tuple[str, int], ...]  # the integers among the arguments


class Compiled(NamedTuple):
    ptx: str
    cubin: bytes
    registers: int
    stack: int  # bytes; spilled registers go there
    shared: int


def recorded_launches(monkeypatch, function) -> list[Launch]:
    """As :func:`recorded_calls`, the launches alone."""
    return [call.launch for call in recorded_calls(monkeypatch, function)]


def recorded_calls(monkeypatch, function) -> list[Call]:
    """What ``function()`` launches, in order; nothing runs. Its tensors may be on the meta device."""
    calls = []

    def record(kernel, *args, grid, warmup, num_warps=4, num_stages=3, maxnreg=None, **kwargs):
        values = dict(zip(kernel.arg_names, args)) | kwargs
        signature, constants, multiples = [], [], []
        for parameter in kernel.params:
            value = values[parameter.name]
            specialised = not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (specialised and type(value) is int and value == 1):
                signature.append((parameter.name, "constexpr"))
                constants.append((parameter.name, value))
                continue
            if isinstance(value, torch.Tensor):
                signature.append((parameter.name, TYPES[value.dtype]))
                multiple = specialised and value.data_ptr() % 16 == 0
            else:
                signature.append((parameter.name, "i32" if -(2**31) <= value < 2**31 else "i64"))
                multiple = specialised and value % 16 == 0
            if multiple:
                multiples.append(parameter.name)
        decisive = tuple(signature), tuple(constants), tuple(multiples), num_warps, num_stages, maxnreg
        numbers = tuple((name, value) for name, value in values.items() if type(value) is int)
        calls.append(Call(Launch(kernel, *decisive), grid, numbers))

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        function()
    return calls


@cache
def compile_for(launch: Launch, capability: int) -> Compiled:
    """Machine code for compute capability ``capability`` / 10, and what cuobjdump says it takes."""
    names = launch.kernel.arg_names
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in launch.multiples_of_16}
    source = ASTSource(launch.kernel, dict(launch.signature), dict(launch.constants), attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "maxnreg": launch.registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [BINARIES / "cuobjdump", "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = (int(re.search(rf"{field}:(\d+)", usage)[1]) for field in ("REG", "STACK"))
    return Compiled(compiled.asm["ptx"], compiled.asm["cubin"], registers, stack, compiled.metadata.shared)


def disassembled(code: Compiled) -> str:
    """The machine code as nvdisasm prints it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(code.cubin)
        command = [BINARIES / "nvdisasm", "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
