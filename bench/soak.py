"""``python -m bench.soak --minutes 20``: a long training watched from outside: memory, open files, threads, rate.

The process is ``iecl-fast pretrain`` as anybody starts it: IE-CL with Ring on the digits, one thread, a worker that is
started anew in each epoch, a checkpoint every 50 steps. It is ended by SIGTERM, before which it writes a checkpoint.
Nothing may grow after the warm-up, the first fifth of the time; the bounds are the constants below.
"""

import argparse
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

from iecl_fast.engine.checkpoint import load_checkpoint
from iecl_fast.engine.figures import png_figure
from iecl_fast.engine.folder import RunFolder
from iecl_fast.engine.logging import read_metrics

WARM_UP = 0.2  # of the time
INTERVAL = 5.0  # seconds from one sample to the next
WINDOWS = 8  # rows of the table
# Bounds. What leaks leaks with the steps: 500 bytes a step would be half a MiB in a thousand.
MIB_PER_1000_STEPS = 0.5
# Steps for each second of CPU time may fall by so much from the beginning to the end, along the fitted line. Others on
# the machine disturb this rate little, and the one by the clock as they like: that one is only reported.
FALL_OF_RATE = 0.1
SETTINGS = (
    "trainer.epochs=1000000",
    "trainer.threads=1",
    "trainer.log_steps=5",
    "trainer.checkpoint_steps=50",
    "trainer.progress=false",
    "data.workers=1",
)


@dataclass
class Sample:
    """What the process was like. seconds: since its first step; cpu: seconds of it and its workers; rss: MiB."""

    seconds: float
    step: int
    cpu: float
    rss: float
    files: int
    threads: int


def watch(minutes: float, folder: RunFolder, settings: tuple[str, ...] = SETTINGS) -> list[Sample]:
    """Train in a process of its own for some minutes after its first step, and sample it.

    Raises:
        RuntimeError: it ended by itself, or not as after SIGTERM.
    """
    command = [sys.executable, "-m", "iecl_fast.cli", "pretrain", "--output", str(folder.path), *settings]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as training:
        process, samples, start = psutil.Process(training.pid), [], None
        try:
            while not samples or samples[-1].seconds < 60 * minutes:
                time.sleep(INTERVAL if samples else 0.2)
                if training.poll() is not None:
                    raise RuntimeError(f"the training ended by itself: {training.stderr.read()}")
                rows = read_metrics(folder.metrics) if folder.metrics.exists() else []
                if rows:
                    start = time.monotonic() if start is None else start
                    samples.append(_sample(process, time.monotonic() - start, rows[-1]["step"]))
        finally:
            training.send_signal(signal.SIGTERM)
            _, message = training.communicate(timeout=120)
    if training.returncode != 128 + signal.SIGTERM:
        raise RuntimeError(f"the training ended with status {training.returncode}: {message}")
    return samples


def _sample(process: psutil.Process, seconds: float, step: int) -> Sample:
    with process.oneshot():
        times, memory = process.cpu_times(), process.memory_info()
        cpu = times.user + times.system + times.children_user + times.children_system
        return Sample(seconds, step, cpu, memory.rss / 2**20, process.num_fds(), process.num_threads())


def slope(x: list[float], y: list[float]) -> float:
    """Of the line with the least squares."""
    return float(np.polyfit(x, y, 1)[0])


@dataclass
class Verdict:
    """What is judged, of the samples after the warm-up.

    steps: taken after the warm-up. memory: MiB that the fitted line rises by in 1000 steps. fall: of the steps for each
    CPU second along the fitted line, as a fraction. files, threads: (median of the first third, of the last third).
    """

    steps: int
    memory: float
    fall: float
    files: tuple[float, float]
    threads: tuple[float, float]

    @classmethod
    def of(cls, samples: list[Sample]) -> "Verdict":
        steady = [sample for sample in samples if sample.seconds >= WARM_UP * samples[-1].seconds]
        third = max(1, len(steady) // 3)
        steps = [sample.step for sample in steady]
        spans = _spans(steady)
        rates = [_rate(*span, "cpu") for span in spans]
        line = np.poly1d(np.polyfit([(one.step + other.step) / 2 for one, other in spans], rates, 1))
        return cls(
            steps=steps[-1] - steps[0],
            memory=1000 * slope(steps, [sample.rss for sample in steady]),
            fall=float(1 - line(steps[-1]) / line(steps[0])),
            files=_thirds([sample.files for sample in steady], third),
            threads=_thirds([sample.threads for sample in steady], third),
        )

    def faults(self) -> list[str]:
        """What is beyond its bound, in words."""
        found = []
        if self.memory > MIB_PER_1000_STEPS:
            found.append(f"memory grows by {self.memory:.2f} MiB in 1000 steps, {MIB_PER_1000_STEPS} are allowed")
        if self.fall > FALL_OF_RATE:
            found.append(f"steps for each CPU second fall by {self.fall:.0%}, {FALL_OF_RATE:.0%} are allowed")
        for name in ("files", "threads"):
            before, after = getattr(self, name)
            if after > before:
                found.append(f"{name} grow from {before:g} to {after:g}")
        return found


def _thirds(values: list[int], third: int) -> tuple[float, float]:
    return float(np.median(values[:third])), float(np.median(values[-third:]))


def _spans(samples: list[Sample]) -> list[tuple[Sample, Sample]]:
    """Pairs of samples from one new row of the metrics to the next: on a busy machine that takes several samples."""
    advanced = [other for one, other in itertools.pairwise(samples) if other.step > one.step]
    return list(itertools.pairwise(advanced))


def _rate(one: Sample, other: Sample, clock: str) -> float:
    """Steps for each second between two samples, by the wall's "seconds" or the "cpu"."""
    return (other.step - one.step) / (getattr(other, clock) - getattr(one, clock))


def markdown(samples: list[Sample]) -> str:
    """A row for each window of the time: medians of what was sampled in it."""
    lines = ["| minutes | steps | MiB | files | threads | steps/s | steps/CPU s |", "|---|--:|--:|--:|--:|--:|--:|"]
    for number in range(WINDOWS):
        low, high = (samples[-1].seconds * edge / WINDOWS for edge in (number, number + 1))
        window = [sample for sample in samples if low <= sample.seconds <= high]
        spans = _spans(window)
        if not spans:
            continue
        medians = [np.median([getattr(sample, name) for sample in window]) for name in ("rss", "files", "threads")]
        rates = [np.median([_rate(*span, clock) for span in spans]) for clock in ("seconds", "cpu")]
        lines.append(
            f"| {low / 60:.1f} to {high / 60:.1f} | {window[-1].step} | {medians[0]:.1f} | {medians[1]:g} "
            f"| {medians[2]:g} | {rates[0]:.2f} | {rates[1]:.2f} |"
        )
    return "\n".join(lines) + "\n"


def draw(samples: list[Sample], path: Path) -> None:
    """Memory, files and threads, and both rates over the minutes, as a PNG file."""
    with png_figure(path, size=(11, 3.2), dpi=120) as figure:
        memory, counts, rates = figure.subplots(1, 3)
        minutes = [sample.seconds / 60 for sample in samples]
        memory.plot(minutes, [sample.rss for sample in samples])
        memory.set(title="resident memory, MiB", ylim=(0, None))
        for name in ("files", "threads"):
            counts.plot(minutes, [getattr(sample, name) for sample in samples], label=name)
        counts.set(title="open files, threads", ylim=(0, None))
        for clock, label in (("seconds", "each second"), ("cpu", "each CPU second")):
            spans = _spans(samples)
            rates.plot([span[1].seconds / 60 for span in spans], [_rate(*span, clock) for span in spans], label=label)
        rates.set(title="steps", ylim=(0, None))
        for axes in (memory, counts, rates):
            axes.axvspan(0, WARM_UP * minutes[-1], color="grey", alpha=0.15)
            axes.set_xlabel("minutes")
            axes.grid(alpha=0.3)
        counts.legend(fontsize=8)
        rates.legend(fontsize=8)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="after the first step (default: 20)")
    parser.add_argument("--output", type=Path, default=Path("bench/results"), metavar="DIR", help="for soak.json, .png")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = RunFolder(Path(temporary) / "run")
        samples = watch(arguments.minutes, folder)
        step = load_checkpoint(folder.checkpoint)["step"]
    verdict = Verdict.of(samples)
    arguments.output.mkdir(parents=True, exist_ok=True)
    record = {"samples": [asdict(sample) for sample in samples], "verdict": asdict(verdict)}
    (arguments.output / "soak.json").write_text(json.dumps(record) + "\n")
    draw(samples, arguments.output / "soak.png")
    print(markdown(samples))
    print(
        f"After the warm-up, {verdict.steps} steps: memory {verdict.memory:+.3f} MiB in 1000 steps, steps for each CPU "
        f"second {-verdict.fall:+.1%}, files {verdict.files}, threads {verdict.threads}. Last checkpoint: step {step}."
    )
    for fault in verdict.faults():
        print(f"FAILED: {fault}")
    return 1 if verdict.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
