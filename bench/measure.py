"""Times and memory of several ways to do one thing, measured side by side in one process.

The machines are shared and noisy: what is compared is run in turn, round by round, and reported as ratios.
"""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

MIB = 2**20


@dataclass
class Measurement:
    """Seconds of each round, and the peak of memory in MiB that a call took beyond what was there before."""

    seconds: list[float]
    peak: float | None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def compare(functions: dict[str, Callable[[], object]], rounds: int = 9) -> dict[str, Measurement]:
    """Run every function `rounds` times, one after the other in each round, after a round that is not counted."""
    peaks = {name: peak_memory(function) for name, function in functions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: Measurement(seconds[name], peaks[name]) for name in functions}


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


def table(title: str, baseline: str, results: dict[str, Measurement]) -> str:
    """Markdown: median milliseconds, ratio to the baseline (median of the rounds' ratios), peak memory."""
    width = max(map(len, results))
    lines = [
        f"### {title}",
        "",
        f"| {'':<{width}} | ms | / {baseline} | peak MiB |",
        f"|{'-' * (width + 2)}|--:|--:|--:|",
    ]
    for name, result in results.items():
        pairs = zip(result.seconds, results[baseline].seconds, strict=True)
        ratio = statistics.median(mine / other for mine, other in pairs)
        peak = "?" if result.peak is None else f"{result.peak:.0f}"
        lines.append(f"| {name:<{width}} | {result.median * 1e3:.1f} | {ratio:.2f} | {peak} |")
    return "\n".join(lines) + "\n"
