"""A run small enough for a test: 48 digits, a ResNet-18 of width 2, six steps an epoch."""

import pytest

from iecl_fast.cli import main
from iecl_fast.engine.checkpoint import load_checkpoint
from iecl_fast.engine.run import Run
from small_runs import SMALL_RUN


@pytest.fixture
def small_run(tmp_path):
    """Arguments of ``iecl-fast pretrain`` for a new run, given the folder's name and further overrides."""

    def arguments(name, *overrides):
        return ["pretrain", "--output", str(tmp_path / name), *SMALL_RUN, *overrides]

    return arguments


@pytest.fixture
def states(monkeypatch):
    """From step to the checkpoint that a run wrote there, as it was before the next one."""
    found, original = {}, Run.save

    def save(run):
        original(run)
        found[run.step] = load_checkpoint(run.folder.checkpoint)

    monkeypatch.setattr(Run, "save", save)
    return found


@pytest.fixture(scope="package")
def whole_run(tmp_path_factory):
    """One uninterrupted run, to compare with."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main(["pretrain", "--output", str(folder), *SMALL_RUN]) == 0
    return folder
