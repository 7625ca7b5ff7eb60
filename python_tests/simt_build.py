"""Builds device code against csrc/simt, the CUDA execution model on the host, into a Python module for the tests."""

import hashlib
import importlib.util
import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pybind11
import torch

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
INCLUDES = [
    f"-I{folder}"
    for folder in (
        CSRC,
        Path(torch.__file__).parent / "include",
        pybind11.get_include(),
        sysconfig.get_path("include"),
    )
]
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"]
MODEL = sorted((CSRC / "simt").glob("*.cpp"))
SUFFIXES = (".h", ".cuh", ".cu")  # of what the sources include
# Every access to memory becomes a call that csrc/simt/memory.cpp answers; no sanitizer is linked.
WATCHED = ["-fsanitize=thread,bounds", "-fno-tree-vectorize"]


def collect_shared_memory(device_code: Path) -> None:
    """Static variables of device code are its shared memory: in a section of its own it can be poisoned and watched."""
    headers = subprocess.run(["objdump", "-h", "-w", device_code], check=True, capture_output=True, text=True).stdout
    # Templates and inline functions keep theirs in sections named .bss.<symbol>.
    sections = re.findall(r"^\s*\d+ (\.bss\S*)", headers, re.MULTILINE)
    renames = [option for section in sections for option in ("--rename-section", f"{section}=simt_shared")]
    subprocess.run(["objcopy", *renames, device_code], check=True)


def build_simt_module(name: str, kernels: Path, bindings: Path, options: tuple[str, ...] = (), changed: Path = CSRC):
    """Import the pybind11 module ``name`` of ``kernels`` (watched) and ``bindings`` (not), built once per contents.

    The files in ``changed`` take the place of those with the same name in csrc.
    """
    compiler = os.environ.get("CXX", "g++")
    headers = [path for folder in (CSRC, changed) for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES]
    contents = [path.read_bytes() for path in (*headers, *MODEL, kernels, bindings)]
    version = subprocess.run([compiler, "--version"], capture_output=True).stdout
    flags = [*FLAGS, *options, f"-I{changed}", *INCLUDES]
    settings = repr((name, flags, WATCHED, torch.__version__)).encode()
    digest = hashlib.sha256(b"\0".join([*contents, version, settings])).hexdigest()[:16]
    folder = ROOT / "build" / "simt" / f"{name}-{digest}"
    library = folder / f"{name}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        flags_of = {kernels: WATCHED, bindings: ["-O0"]} | {source: ["-O2"] for source in MODEL}
        objects = {source: folder / f"{source.stem}.{os.getpid()}.o" for source in flags_of}
        compiles = {}
        for source, target in objects.items():
            command = [compiler, *flags, *flags_of[source], "-x", "c++", "-c", str(source), "-o", str(target)]
            compiles[source] = subprocess.Popen(command)
        failed = [source.name for source, compile in compiles.items() if compile.wait() != 0]
        if failed:
            raise RuntimeError(f"{', '.join(failed)} did not compile")
        collect_shared_memory(objects[kernels])
        unfinished = folder / f"{name}.{os.getpid()}.so"
        subprocess.run([compiler, "-shared", *map(str, objects.values()), "-o", str(unfinished)], check=True)
        unfinished.replace(library)  # whole or not at all, also if two test processes build it
    spec = importlib.util.spec_from_file_location(name, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
