"""A run small enough for a test: 48 digits, a ResNet-18 of width 2, six steps an epoch."""

import pytest

from iecl_fast.cli import main

SMALL_RUN = [
    "encoder.stem=imagenet",
    "encoder.width=2",
    "trainer.threads=1",
    "method.dim=8",
    "method.num_keys=32",
    "ring.lower=[0,50]",
    "ring.upper=95",
    "data.limit=48",
    "trainer.batch_size=8",
    "trainer.epochs=3",
    "trainer.log_steps=1",
    "trainer.progress=false",
    "evaluate.linear_iterations=10",
]


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
