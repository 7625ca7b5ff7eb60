"""Times and memory of several ways to do one thing, measured side by side in one process.

The machines are shared and noisy: what is compared is run in turn, round by round, and reported as ratios.
"""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.device import device_clock, peak_device_memory

MIB = 2**20


@dataclass
class Measurement:
    """Seconds of each round, and the peak of memory in MiB that a call took beyond what was there before."""

    seconds: list[float]
    peak: float | None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def compare(functions: dict[str, Callable[[], object]], rounds: int = 9, device: str = "cpu") -> dict[str, Measurement]:
    """Run every function `rounds` times, one after the other in each round, after a round that is not counted."""
    if device == "cuda":
        peaks = {name: peak_device_memory(function) for name, function in functions.items()}
        clocks = {name: device_clock(function) for name, function in functions.items()}
    else:
        peaks = {name: peak_memory(function) for name, function in functions.items()}
        keep_freed_memory()
        clocks = {name: wall_clock(function) for name, function in functions.items()}
        for clock in clocks.values():
            clock()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, clock in clocks.items():
            seconds[name].append(clock())
    return {name: Measurement(seconds[name], peaks[name]) for name in functions}


def wall_clock(function: Callable[[], object]) -> Callable[[], float]:
    """Seconds of one call."""

    def clock() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return clock


def keep_freed_memory() -> None:
    """Ask glibc to keep up to 1 GiB of what is freed.

    Otherwise it is an accident of the heap's layout whether a function gets its result's pages anew from the system in
    every call, which for 94 MB of weights is as dear as computing them. Blocks beyond 32 MiB, such as a large N x K
    matrix, still come from the system.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(trim_threshold, 2**30)
    libc.mallopt(mmap_threshold, 32 * MIB)  # the most it takes


def peak_memory(function: Callable[[], object]) -> float | None:
    """MiB of resident memory that a second call needs at its peak, its result included; None where it cannot be told.

    The first call sets up what stays: threads, code, caches. Free memory is given back to the system in between, or the
    call would find it there.
    """
    function()
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the peak
        before = _status("VmRSS")
        function()
        return _status("VmHWM") - before
    except OSError:
        return None


def _status(field: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024


@dataclass
class Table:
    """Several ways to do one thing, against one of them."""

    title: str
    baseline: str
    results: dict[str, Measurement]

    def ratio(self, name: str) -> float:
        """The median of the rounds' ratios to the baseline."""
        pairs = zip(self.results[name].seconds, self.results[self.baseline].seconds, strict=True)
        return statistics.median(mine / other for mine, other in pairs)

    def markdown(self) -> str:
        width = max(map(len, self.results))
        lines = [
            f"### {self.title}",
            "",
            f"| {'':<{width}} | ms | / {self.baseline} | peak MiB |",
            f"|{'-' * (width + 2)}|--:|--:|--:|",
        ]
        for name, result in self.results.items():
            milliseconds = result.median * 1e3
            time = f"{milliseconds:.1f}" if milliseconds >= 10 else f"{milliseconds:.3g}"
            peak = "?" if result.peak is None else f"{result.peak:.0f}"
            lines.append(f"| {name:<{width}} | {time} | {self.ratio(name):.2f} | {peak} |")
        return "\n".join(lines) + "\n"

    def record(self) -> dict:
        """What a JSON file keeps."""
        rows = {
            name: {"seconds": result.seconds, "peak_mib": result.peak, "ratio": self.ratio(name)}
            for name, result in self.results.items()
        }
        return {"title": self.title, "baseline": self.baseline, "rows": rows}
