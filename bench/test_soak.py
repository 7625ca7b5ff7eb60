"""The soak's judgement, and the soak itself for a few seconds."""

import pytest

from bench import soak
from bench.soak import Sample, Verdict
from iecl_fast.engine.checkpoint import load_checkpoint
from iecl_fast.engine.folder import RunFolder


def samples(*, leak=0.0, slower=0.0, files=0.0, count=240):
    """Of a process of 10 steps a second that leaks MiB a step, becomes slower, and keeps files open."""
    made, cpu = [], 0.0
    for number in range(count):
        step = 50 * number
        cpu += 5.0 * (1 + slower * number / count)
        rss = 400 + leak * step + (number % 7)
        made.append(Sample(5.0 * number, step, cpu, rss, 20 + int(files * number) + number % 2, 9))
    return made


def test_a_steady_process_passes():
    verdict = Verdict.of(samples())
    assert verdict.faults() == []
    assert verdict.steps == 50 * (239 - 48)
    assert abs(verdict.memory) < 0.1


@pytest.mark.parametrize(
    ("process", "words"),
    [({"leak": 0.001}, "memory grows by 1"), ({"slower": 0.3}, "CPU second fall"), ({"files": 0.1}, "files grow")],
)
def test_what_grows_is_named(process, words):
    (fault,) = Verdict.of(samples(**process)).faults()
    assert words in fault


def test_table_and_picture(tmp_path):
    lines = soak.markdown(samples()).splitlines()
    assert len(lines) == 2 + soak.WINDOWS
    assert lines[-1].endswith("| 10.00 | 10.00 |")
    soak.draw(samples(), tmp_path / "soak.png")
    assert (tmp_path / "soak.png").stat().st_size > 10_000


def test_a_training_is_watched_and_ends_with_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "INTERVAL", 0.5)
    folder = RunFolder(tmp_path / "run")
    small = ("encoder.width=2", "method.hidden_dim=16", "data.limit=256", "evaluate.linear_iterations=5")
    seen = soak.watch(0.05, folder, (*soak.SETTINGS, *small))
    assert seen[-1].seconds >= 3
    assert seen[-1].step > seen[0].step
    assert all(sample.rss > 50 and sample.files > 2 and sample.threads >= 1 for sample in seen)
    assert load_checkpoint(folder.checkpoint)["step"] >= seen[-1].step
