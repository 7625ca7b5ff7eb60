"""Builds the two operator libraries of iecl_fast.

``_cpu``   always, with the C++ compiler.
``_cuda``  when nvcc is found and the installed torch has CUDA. FORCE_CUDA=1 turns "not found" into an error.

Both use LibTorch's stable ABI, hold no Python, and so serve every torch from 2.11 on. What was built, with what, is
written to ``iecl_fast/_build.json`` for ``iecl-fast doctor``.
"""

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
STABLE_ABI = "0x020b000000000000"  # 2.11
ARCHITECTURES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")


def find_torch():
    """Import torch, from the interpreter's own site-packages when pip builds in an isolated environment.

    Building against the torch that will run, and not against a second one that pip fetched into the sandbox, saves
    gigabytes and keeps the CUDA versions of both in step.
    """
    for folder in (None, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        if folder is not None and folder not in sys.path:
            sys.path.append(folder)  # last, so that the sandbox's setuptools and ninja still win
        try:
            import torch

            return torch
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
    return None


def find_cuda(torch):
    """The CUDA toolkit's folder, or None with the reason why no CUDA library is built."""
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if nvcc is None:
        return None, "nvcc was not found (CUDA_HOME, PATH)"
    if torch.version.cuda is None:
        return None, f"torch {torch.__version__} is a CPU build"
    # nvcc on PATH may be a wrapper script or a link: nvcc alone knows where its toolkit lies.
    dry_run = subprocess.run([nvcc, "-dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", dry_run, re.MULTILINE)
    if top is None:
        return None, f"{nvcc} -dryrun does not say where its toolkit lies"
    home = Path(top[1].strip()).resolve()
    version = re.search(r"release (\d+)\.", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout)
    if version is None or version[1] != torch.version.cuda.split(".")[0]:
        return None, f"nvcc in {home} is CUDA {version and version[1]}, torch was built with CUDA {torch.version.cuda}"
    return home, None


def supported_architectures(nvcc):
    """The default list of GPU architectures, without those that this nvcc does not know."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
    known = {int(number) for number in re.findall(r"compute_(\d+)", listed)}
    chosen = [name for name in ARCHITECTURES if int(name.replace(".", "")) in known]
    return ";".join(chosen) + "+PTX"


def dependencies(torch):
    """What to install. Just "torchvision" would make pip take the newest, and with it another torch than is here."""
    torchvision = "torchvision"
    if torch is not None and importlib.util.find_spec("torchvision") is None:
        major, minor = (int(number) for number in torch.__version__.split(".")[:2])
        if major == 2:
            torchvision = f"torchvision==0.{minor + 15}.*"  # since torch 2.0 came with torchvision 0.15
    return [
        "torch>=2.11",
        torchvision,
        "numpy",
        "lightning-fabric>=2.5",
        "scikit-learn",
        "matplotlib",
        "tensorboard",
        "tqdm",
        "PyYAML",
    ]


def sources(folder, pattern):
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / folder).glob(pattern))


def configure():
    """Keyword arguments for setup(): with the extensions where torch is there, without where it has to be asked for.

    pip calls this file twice, first to hear what the build needs (setup_requires), then to build with it.
    """
    torch = find_torch()
    if torch is None:
        return {"setup_requires": ["torch>=2.11"], "install_requires": dependencies(torch)}

    home, reason = find_cuda(torch)
    if home is None and os.environ.get("FORCE_CUDA") == "1":
        sys.exit(f"FORCE_CUDA=1, but the CUDA library of iecl_fast cannot be built: {reason}.")
    if home is not None:
        os.environ["CUDA_HOME"] = str(home)
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", supported_architectures(home / "bin" / "nvcc"))

    # Imported only now: it reads CUDA_HOME at import.
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension, get_cxx_compiler

    macros = [("TORCH_TARGET_VERSION", STABLE_ABI)]
    rooms = ("ring", "saib", "spectral")
    cpp_flags = ["-O3", "-g0", "-ffp-contract=fast", "-fvisibility=hidden", "-Wno-psabi", "-Wno-unknown-pragmas"]
    extensions = [
        CppExtension(
            "iecl_fast._cpu",
            ["csrc/library.cpp", *(file for room in rooms for file in sources(room, "*_cpu*.cpp"))],
            include_dirs=[str(ROOT / "csrc")],
            define_macros=macros,
            extra_compile_args={"cxx": cpp_flags},
            py_limited_api=True,
        )
    ]
    if home is not None:
        extensions.append(
            CUDAExtension(
                "iecl_fast._cuda",
                ["csrc/library_cuda.cu", *(file for room in rooms for file in sources(room, "*_cuda.cu"))],
                include_dirs=[str(ROOT / "csrc")],
                define_macros=[*macros, ("USE_CUDA", None)],
                extra_compile_args={"cxx": cpp_flags, "nvcc": ["-O3", "--compiler-options=-fvisibility=hidden"]},
                py_limited_api=True,
            )
        )

    build = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda if home is not None else None,
        "cuda_missing": reason,
        "architectures": os.environ.get("TORCH_CUDA_ARCH_LIST") if home is not None else None,
        "python": sys.version.split()[0],
        "machine": platform.machine(),
    }

    class BuildLibraries(BuildExtension):
        def run(self):
            compiler = get_cxx_compiler()
            if shutil.which(compiler.split()[0]) is None:
                sys.exit(f"iecl_fast needs a C++ compiler: {compiler} was not found (CXX, PATH).")
            super().run()
            folder = ROOT if self.inplace else Path(self.build_lib)
            (folder / "iecl_fast" / "_build.json").write_text(json.dumps(build, indent=2) + "\n")
            print("iecl_fast: built the CPU library", "and the CUDA library" if home else f"only: {reason}")

    command = BuildLibraries.with_options(no_python_abi_suffix=True, use_ninja=shutil.which("ninja") is not None)
    return {"ext_modules": extensions, "cmdclass": {"build_ext": command}, "install_requires": dependencies(torch)}


setup(**configure())
