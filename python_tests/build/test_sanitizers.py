"""The C++ kernels under the sanitizers: no access out of bounds, nothing undefined, no race. See docs/testing.md."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import sanitizers

HERE = Path(__file__).parent
FAULTS = """
#include <cstdint>
extern "C" int64_t beyond(int64_t size) {
  float* values = new float[size]();
  const int64_t bits = static_cast<int64_t>(values[size]);
  delete[] values;
  return bits;
}
extern "C" int overflow(int number) { return number + 2147483647; }
extern "C" int not_an_integer(double number) { return static_cast<int>(number); }
"""

needs = [name for name in ("libasan.so", "libubsan.so", "libtsan.so") if sanitizers.runtime(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(needs), reason=f"{sanitizers.COMPILER} has no {', '.join(needs)}"),
    pytest.mark.skipif(shutil.which("ninja") is None, reason="builds with ninja"),
]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return sanitizers.sanitized_package(tmp_path_factory.mktemp("sanitized"))


@pytest.fixture(scope="module")
def threads():
    return sanitizers.build("threads", [HERE / "threads.cpp", *sanitizers.kernel_sources()], sanitizers.THREADS, [])


@pytest.mark.parametrize(
    ("call", "report"),
    [
        ("beyond(8)", "heap-buffer-overflow"),
        ("overflow(1)", "signed integer overflow"),
        ("not_an_integer(ctypes.c_double(1e300))", "outside the range of representable values"),
        ("overflow(-1)", None),
    ],
)
def test_they_are_awake(call, report, tmp_path):
    source = tmp_path / "faults.cpp"
    source.write_text(FAULTS)
    library = sanitizers.build("faults.so", [source], sanitizers.MEMORY, ["-shared"])
    result = sanitizers.watched(["-c", f"import ctypes; ctypes.CDLL({str(library)!r}).{call}"], tmp_path)
    assert (result.returncode == 0) == (report is None), result.stderr
    assert report is None or report in result.stderr


@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_operators_stay_within_their_memory(package, isa):
    """The fuzz tests of the operators, and the cases that need many keys."""
    code = "import iecl_fast, torch; print(iecl_fast.__file__, torch.ops.iecl_fast._instruction_set())"
    here = sanitizers.watched(["-c", code], package, IECL_FAST_ISA=isa)
    assert here.returncode == 0 and here.stdout.startswith(str(package)), here.stderr
    if here.stdout.split()[-1] != isa:
        pytest.skip(f"this machine has no {isa}")
    tests = HERE.parent
    chosen = [
        tests / "ring" / "test_ring_fuzz.py",
        tests / "saib" / "test_saib_fuzz.py::test_output_and_gradients",
        tests / "spectral" / "test_spectral_fuzz.py::test_operators",
        tests / "ring" / "test_sample.py::test_large_queue_takes_brackets_and_agrees",
        tests / "ring" / "test_sample.py::test_any_number_of_channels",
        tests / "ring" / "test_info_nce.py::test_tied_keys",
        tests / "ring" / "test_info_nce.py::test_a_sample_that_misleads_is_noticed",
    ]
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, chosen)]
    result = sanitizers.watched(command, package, IECL_FAST_ISA=isa)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-6000:]


def run_threads(program, *arguments, **environment):
    """Address-space randomisation off where that is possible: ThreadSanitizer's runtime may not find its place else."""
    command = [str(program), *arguments]
    plain = shutil.which("setarch")
    if plain is not None and subprocess.run([plain, platform.machine(), "-R", "true"]).returncode == 0:
        command = [plain, platform.machine(), "-R", *command]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_a_race_is_noticed(threads):
    result = run_threads(threads, "race")
    assert result.returncode != 0 and "data race" in result.stderr


@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_kernels_have_no_race(threads, isa):
    """One thread and four give the same bits, and no two of the four meet at a number."""
    result = run_threads(threads, IECL_FAST_ISA=isa)
    assert result.returncode == 0, result.stdout + result.stderr[-6000:]
    assert result.stdout.count("equal") == 7
