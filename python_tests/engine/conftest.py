"""A run small enough for a test: 48 digits, a ResNet-18 of width 2, six steps an epoch."""

import pytest

from iecl_fast.cli import main
from small_runs import SMALL_RUN


@pytest.fixture
def small_run(tmp_path):
    """Arguments of ``iecl-fast pretrain`` for a new run, given the folder's name and further overrides."""

    def arguments(name, *overrides):
        return ["pretrain", "--output", str(tmp_path / name), *SMALL_RUN, *overrides]

    return arguments


@pytest.fixture(scope="package")
def whole_run(tmp_path_factory):
    """One uninterrupted run, to compare with."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main(["pretrain", "--output", str(folder), *SMALL_RUN]) == 0
    return folder
