"""Builds the C++ kernels of the CPU with the sanitizers of GCC, each build once per contents of csrc."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
COMPILER = os.environ.get("CXX", "g++")
ROOMS = ("ring", "saib", "spectral")
FLAGS = ["-std=c++20", "-O1", "-g1", "-fno-omit-frame-pointer", "-ffp-contract=fast", "-fPIC", "-Wno-psabi"]
FLAGS += ["-Wno-unknown-pragmas", "-fno-sanitize-recover=all", f"-I{CSRC}"]
MEMORY = ["-fsanitize=address,undefined,float-cast-overflow"]  # and what the language leaves undefined
THREADS = ["-fsanitize=thread"]


def runtime(name: str) -> str | None:
    """The path of a library of the compiler; None where it has none."""
    found = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) else None


def kernel_sources() -> list[Path]:
    """The files of setup.py's CPU library that do not see torch."""
    return sorted(path for room in ROOMS for path in (CSRC / room).glob("*_cpu*.cpp"))


def build(name: str, sources: list[Path], flags: list[str], link: list[str]) -> Path:
    """Compile and link with ninja, two files at a time."""
    headers = sorted(path for path in CSRC.rglob("*") if path.suffix == ".h")
    version = subprocess.run([COMPILER, "--version"], capture_output=True).stdout
    settings = repr((name, FLAGS, flags, link, torch.__version__)).encode()
    contents = [path.read_bytes() for path in (*headers, *sources)]
    digest = hashlib.sha256(b"\0".join([*contents, version, settings])).hexdigest()[:16]
    folder = ROOT / "build" / "sanitized" / f"{name}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    objects = {f"{source.parent.name}_{source.stem}.o": source for source in sources}
    lines = [f"rule compile\n  command = {COMPILER} {' '.join(FLAGS + flags)} -c $in -o $out"]
    lines += [f"rule link\n  command = {COMPILER} {' '.join(flags)} $in {' '.join(link)} -o $out"]
    lines += [f"build {target}: compile {source}" for target, source in objects.items()]
    lines += [f"build {name}: link {' '.join(objects)}", ""]
    (folder / "build.ninja").write_text("\n".join(lines))
    result = subprocess.run(["ninja", "-j2"], cwd=folder, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(result.stdout[-4000:])
    return folder / name


def sanitized_package(folder: Path) -> Path:
    """A copy of the package whose CPU library is watched; returns the folder to put on the path."""
    macro = re.search(r'STABLE_ABI = "(\w+)"', (ROOT / "setup.py").read_text())[1]
    torch_folder = Path(torch.__file__).parent
    flags = [*MEMORY, "-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={macro}"]
    flags += [f"-isystem {torch_folder / 'include'}", f"-isystem {torch_folder / 'include/torch/csrc/api/include'}"]
    link = ["-shared", f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu"]
    library = build("_cpu.so", [CSRC / "library.cpp", *kernel_sources()], flags, link)
    shutil.copytree(
        ROOT / "iecl_fast", folder / "iecl_fast", ignore=shutil.ignore_patterns("*.so", "__pycache__", "_build.json")
    )
    shutil.copy(library, folder / "iecl_fast" / "_cpu.so")
    return folder


def watched(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run Python in a folder so that the sanitizers watch what it loads. Its own leaks are left out."""
    # libstdc++ first, too: else exceptions are thrown past the sanitizer.
    preload = ":".join(path for path in map(runtime, ("libasan.so", "libubsan.so", "libstdc++.so.6")) if path)
    variables = {
        **os.environ,
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "2",
        **environment,
    }
    return subprocess.run([sys.executable, *command], cwd=folder, env=variables, capture_output=True, text=True)
