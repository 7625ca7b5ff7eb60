"""setup.py on machines of every kind, and what the package says when something is missing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from iecl_fast import _library, cli, doctor

ROOT = Path(__file__).parents[2]


def setup(*arguments, **environment):
    """Run setup.py. An environment variable that is None is removed."""
    variables = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    return subprocess.run(
        [sys.executable, "setup.py", *arguments], cwd=ROOT, env=variables, capture_output=True, text=True
    )


def path_without_nvcc(folder: Path) -> str:
    """A folder with links to the programs that a build needs, nvcc not among them."""
    for program in ("c++", "g++", "gcc", "cc", "ld", "as", "ninja", "sh", "env", "which", "c++filt"):
        found = shutil.which(program)
        if found:
            (folder / program).symlink_to(found)
    return str(folder)


@pytest.fixture(scope="module")
def cpu_only_build(tmp_path_factory):
    folder = tmp_path_factory.mktemp("build")
    programs = folder / "bin"
    programs.mkdir()
    arguments = ("build_ext", "--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp"))
    result = setup(*arguments, PATH=path_without_nvcc(programs), CUDA_HOME=None, CUDA_PATH=None, FORCE_CUDA=None)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "lib" / "iecl_fast", result


def test_without_nvcc_the_cpu_library_is_built_and_the_reason_said(cpu_only_build):
    folder, result = cpu_only_build
    assert (folder / "_cpu.so").exists() and not (folder / "_cuda.so").exists()
    info = json.loads((folder / "_build.json").read_text())
    assert info["cuda"] is None and info["torch"] == torch.__version__
    expected = "nvcc was not found" if torch.version.cuda or shutil.which("nvcc") is None else "CPU build"
    assert expected in info["cuda_missing"] and expected in result.stdout


def test_without_a_compiler_one_message_says_so(tmp_path):
    result = setup("build_ext", "--build-lib", str(tmp_path), PATH=str(tmp_path), CXX=None, CUDA_HOME=None)
    assert result.returncode == 1
    assert "needs a C++ compiler: c++ was not found (CXX, PATH)" in result.stderr and "Traceback" not in result.stderr


def test_the_library_holds_no_python_and_only_the_stable_abi(cpu_only_build):
    folder, _ = cpu_only_build
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", folder / "_cpu.so"], capture_output=True, text=True
    ).stdout
    names = [line.split()[-1].split("@")[0] for line in symbols.splitlines()]
    assert not [name for name in names if name.startswith(("Py", "_Py"))]
    of_torch = [name for name in names if "torch" in name or "c10" in name or "at6" in name]
    assert of_torch and all(name.startswith(("torch_", "aoti_torch_")) for name in of_torch)


def test_instructions_of_one_machine_stay_out_of_shared_code(cpu_only_build):
    """Functions of the standard library compiled for AVX-512 must not be the ones that everybody links to."""
    folder, _ = cpu_only_build
    objects = list(folder.parents[1].glob("temp/**/tile_cpu_avx*.o"))
    assert len(objects) == 2
    for path in objects:
        symbols = subprocess.run(["nm", "-C", path], capture_output=True, text=True).stdout
        assert " T " not in symbols and " W " not in symbols and " V " not in symbols


def test_forced_cuda_without_nvcc_is_one_sentence(tmp_path):
    result = setup("build_ext", PATH=path_without_nvcc(tmp_path), CUDA_HOME=None, FORCE_CUDA="1")
    assert result.returncode != 0
    assert "FORCE_CUDA=1, but the CUDA library of iecl_fast cannot be built:" in result.stderr
    assert "Traceback" not in result.stderr


def test_no_torch_anywhere_asks_for_it():
    """In pip's isolated build of an interpreter without torch, setup.py has to name torch as a requirement."""
    code = """
import sys, sysconfig
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Hide())
from setuptools import build_meta
print(build_meta.get_requires_for_build_wheel())
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "torch>=2.11" in result.stdout


def test_isolated_build_uses_the_torch_that_is_installed(tmp_path):
    """pip hides site-packages from the build, as is done here."""
    setuptools = Path(__import__("setuptools").__file__).parents[1]
    for name in ("setuptools", "_distutils_hack", "pkg_resources"):
        if (setuptools / name).exists():
            (tmp_path / name).symlink_to(setuptools / name)
    code = f"""
import sys
sys.path[:] = [{str(tmp_path)!r}, *(entry for entry in sys.path if "site-packages" not in entry)]
from setuptools import build_meta
print(build_meta.get_requires_for_build_wheel())
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "torch" not in result.stdout.splitlines()[-1]


@pytest.mark.skipif(
    shutil.which("nvcc") is None or torch.version.cuda is None, reason="no nvcc, or a CPU build of torch"
)
def test_with_nvcc_the_cuda_library_was_built():
    assert _library.build_info()["cuda"] == torch.version.cuda
    assert _library.cuda_missing is None
    assert torch.ops.iecl_fast.cuda_toolkit_version() // 1000 == int(torch.version.cuda.split(".")[0])


def test_nvcc_behind_a_wrapper_script_leads_to_its_toolkit(tmp_path):
    if shutil.which("nvcc") is None or torch.version.cuda is None:
        pytest.skip("no nvcc, or a CPU build of torch")
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("nvcc")} "$@"\n')
    wrapper.chmod(0o755)
    code = f"""
import os, sys
os.environ["PATH"] = {str(wrapper.parent)!r} + os.pathsep + os.environ["PATH"]
os.environ.pop("CUDA_HOME", None)
import setuptools
setuptools.setup = lambda **arguments: print("HOME", os.environ["CUDA_HOME"], os.environ["TORCH_CUDA_ARCH_LIST"])
exec(compile(open("setup.py").read(), "setup.py", "exec"), {{"__file__": "setup.py", "__name__": "__main__"}})
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    line = next(line for line in result.stdout.splitlines() if line.startswith("HOME"))
    assert (Path(line.split()[1]) / "include" / "cuda_runtime.h").exists()
    assert "9.0" in line  # an architecture list although there is no GPU to ask


def test_doctor_says_what_is_used():
    text = doctor.report()
    for word in ("torch", "CPU library", "CUDA library", "ring_sample", "ring_info_nce", torch.__version__):
        assert word in text


def test_doctor_gives_the_reason_why_there_is_no_cuda_library(monkeypatch):
    monkeypatch.setattr(_library, "build_info", lambda: {"cuda_missing": "nvcc was not found (CUDA_HOME, PATH)"})
    assert "not built: nvcc was not found" in doctor.report()
    monkeypatch.setattr(_library, "build_info", lambda: {"cuda_missing": None, "architectures": "9.0"})
    monkeypatch.setattr(_library, "cuda_missing", "libcudart.so.13: no such file")
    assert "not loaded: libcudart.so.13" in doctor.report()


def test_a_torchvision_of_another_torch_is_one_sentence(monkeypatch, capsys):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "torchvision":
                raise RuntimeError("operator torchvision::nms does not exist")

    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert "operator torchvision::nms does not exist" in doctor.report()
    assert cli.main(["pretrain"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("iecl-fast: torchvision") and "install the torchvision that belongs to it" in message


def test_a_missing_cpu_library_is_one_sentence(tmp_path):
    package = tmp_path / "iecl_fast"
    shutil.copytree(ROOT / "iecl_fast", package, ignore=shutil.ignore_patterns("*.so", "_build.json", "__pycache__"))
    paths = [str(tmp_path), *(entry for entry in sys.path if entry and not (Path(entry) / "iecl_fast").exists())]
    # An editable installation is found by a finder of its own, which is taken away.
    code = f"""
import sys
sys.path[:] = {paths!r}
sys.meta_path[:] = [finder for finder in sys.meta_path if "ditable" not in str(finder)]
import iecl_fast
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: iecl_fast has no CPU library") and "pip install ." in last


def test_a_broken_library_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "_broken.so").write_bytes(b"no library")
    monkeypatch.setattr(_library, "FOLDER", tmp_path)
    reason = _library._load("_broken")
    assert "does not load with torch" in reason and torch.__version__ in reason


def test_import_needs_torch_alone_and_little_time():
    """Whoever wants ring_sample in a MoCo of his own must not pay for the training stack."""
    code = """
import sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import iecl_fast
seconds = time.perf_counter() - start
print(seconds, *{name.split(".")[0] for name in set(sys.modules) - before})
"""
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    seconds, modules = zip(*(run.stdout.split(maxsplit=1) for run in runs))
    assert min(map(float, seconds)) < 0.3
    heavy = {"torchvision", "sklearn", "lightning", "lightning_fabric", "matplotlib", "tensorboard", "tqdm", "yaml"}
    assert not heavy & set(modules[0].split())


@pytest.mark.parametrize(
    ("version", "torchvision", "expected"),
    [
        ("2.13.0+cpu", None, "torchvision==0.28.*"),
        ("2.14.1+cu130", "there", "torchvision"),
        (None, None, "torchvision"),
    ],
)
def test_torchvision_is_the_one_of_the_torch_that_is_there(monkeypatch, version, torchvision, expected):
    """Any other would make pip replace torch."""
    import importlib.util
    import types

    import setuptools

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    code = (ROOT / "setup.py").read_text()
    module = types.ModuleType("setup")
    module.__file__ = str(ROOT / "setup.py")
    exec(compile(code, "setup.py", "exec"), module.__dict__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: torchvision)
    torch_here = version and types.SimpleNamespace(__version__=version)
    assert expected in module.dependencies(torch_here)
