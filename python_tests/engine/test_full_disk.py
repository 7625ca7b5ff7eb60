"""A disk that is full in the middle of a run: a message, exit status 1, and the last checkpoint as it was."""

import os
import resource
import subprocess
from contextlib import contextmanager

import pytest

from iecl_fast.cli import main
from iecl_fast.engine import run
from iecl_fast.engine.checkpoint import is_leftover, load_checkpoint
from iecl_fast.engine.logging import RunLog
from test_pretrain import assert_same_run


@contextmanager
def files_no_longer_than(size):
    """As on a full disk a write fails, in the middle of a file, whoever runs the tests: EFBIG in place of ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill_at(step, folder, limit):
    """A RunLog that finds the disk full from a step on: files may not become longer than `limit(folder)`."""

    def write(self, current, *arguments):
        if current == step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit(folder), resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        original(self, current, *arguments)

    original = RunLog.write
    return write


@pytest.mark.parametrize(
    ("step", "limit", "file", "kept"),
    [
        (8, lambda folder: 60_000, "last.ckpt", 6),
        (8, lambda folder: (folder / "metrics.csv").stat().st_size + 20, "metrics.csv", 6),
        (8, lambda folder: (folder / "metrics.csv").stat().st_size + 1_000, "tensorboard", 6),
    ],
    ids=["checkpoint", "metrics", "tensorboard"],
)
def test_the_last_checkpoint_is_kept(small_run, whole_run, tmp_path, monkeypatch, capsys, step, limit, file, kept):
    folder = tmp_path / "run"
    with files_no_longer_than(resource.getrlimit(resource.RLIMIT_FSIZE)[0]), monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", fill_at(step, folder, limit))
        assert main(small_run("run")) == 1
    message = capsys.readouterr().err
    assert file in message and "File too large" in message
    assert f"the checkpoint of step {kept} is kept" in message
    assert "Traceback" not in message
    assert load_checkpoint(folder / "checkpoints" / "last.ckpt")["step"] == kept
    assert not any(map(is_leftover, folder.rglob(".*")))
    assert main(["pretrain", "--resume", str(folder)]) == 0
    assert_same_run(folder, whole_run)


def test_pictures_that_cannot_be_written(small_run, whole_run, tmp_path, monkeypatch, capsys):
    def draw(*arguments):
        with files_no_longer_than(5_000):
            original(*arguments)

    original, folder = run.draw_curves, tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(run, "draw_curves", draw)
        assert main(small_run("run")) == 1
    message = capsys.readouterr().err
    assert "curves.png: File too large; the checkpoint of step 18 is kept" in message
    assert not (folder / "curves.png").exists() and not (folder / "result.json").exists()
    assert main(["pretrain", "--resume", str(folder)]) == 0
    assert_same_run(folder, whole_run)
    assert (folder / "curves.png").stat().st_size > 10_000


@pytest.fixture
def small_disk(tmp_path):
    """A disk of one MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", place], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_disk_that_is_really_full(small_run, whole_run, small_disk, monkeypatch, capsys):
    def write(self, step, *arguments):
        original(self, step, *arguments)
        if step == 8:
            free = os.statvfs(small_disk)
            (small_disk / "another's").write_bytes(bytes(free.f_bavail * free.f_frsize - 30_000))

    original, folder = RunLog.write, small_disk / "run"
    arguments = [word if word != str(small_disk.parent / "run") else str(folder) for word in small_run("run")]
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", write)
        assert main(arguments) == 1
    message = capsys.readouterr().err
    assert "No space left on device; the checkpoint of step 6 is kept" in message
    assert "Traceback" not in message
    assert load_checkpoint(folder / "checkpoints" / "last.ckpt")["step"] == 6
    (small_disk / "another's").unlink()
    assert main(["pretrain", "--resume", str(folder)]) == 0
    assert_same_run(folder, whole_run)
