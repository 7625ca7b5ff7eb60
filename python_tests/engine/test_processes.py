"""How many processes a run has, and that what torchrun has started and what is asked for are one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from iecl_fast.engine.config import resolve
from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.processes import count_processes, is_first_process, launch_fabric, seed_rank

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "4",
    "WORLD_SIZE": "8",
    "RANK": "4",
    "LOCAL_RANK": "0",
}


@pytest.fixture
def torchrun(monkeypatch):
    """The environment of the first process on the second of two machines."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


def trainer(**values):
    return replace(resolve({}).trainer, batch_size=48, accelerator="cpu", **values)


def test_on_one_machine_the_settings_decide():
    assert count_processes(trainer()).world_size == 1
    assert count_processes(trainer(devices="auto")).world_size == 1  # of a CPU
    assert count_processes(trainer(devices=3)).world_size == 3
    several = count_processes(trainer(devices=4, num_nodes=2))
    assert (several.world_size, several.nodes, several.devices, several.torchrun) == (8, 2, 4, False)


@pytest.mark.parametrize("values", [{}, {"devices": 4}, {"devices": "auto"}, {"devices": 4, "num_nodes": 2}])
def test_under_torchrun_what_it_has_started_is_taken(torchrun, values):
    processes = count_processes(trainer(**values))
    assert (processes.world_size, processes.nodes, processes.devices, processes.torchrun) == (8, 2, 4, True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"devices": 2}, "trainer.devices: 2 is not allowed, torchrun has started 4 processes on this machine"),
        ({"num_nodes": 1}, "trainer.num_nodes: 1 is not allowed, torchrun has started 2 machines' processes"),
    ],
)
def test_under_torchrun_other_settings_are_refused(torchrun, values, words):
    with pytest.raises(UsageError, match=words):
        count_processes(trainer(**values))


def test_machines_with_unequal_numbers_of_processes_are_refused(torchrun, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "7")
    with pytest.raises(UsageError, match="7 processes on 2 machines, 4 on this one: all machines must have equally"):
        count_processes(trainer())


def test_several_machines_need_torchrun():
    with pytest.raises(UsageError, match=r"trainer\.num_nodes: 2 is not allowed without torchrun"):
        launch_fabric(trainer(num_nodes=2))


@pytest.mark.parametrize(("batch_size", "devices"), [(8, 3), (4, 4)])
def test_a_batch_that_devices_cannot_share(batch_size, devices):
    with pytest.raises(UsageError, match=rf"{batch_size} is not allowed, it must be a multiple of .*, {devices}, and"):
        count_processes(replace(trainer(devices=devices), batch_size=batch_size))


def test_batch_norm_over_devices_needs_cuda():
    with pytest.raises(UsageError, match=r"sync_batch_norm: true is not allowed with 2 devices of the kind cpu"):
        count_processes(trainer(devices=2, sync_batch_norm=True))
    assert count_processes(trainer(sync_batch_norm=True)).world_size == 1  # one device has all images anyway
    assert count_processes(replace(trainer(devices=2, sync_batch_norm=True), accelerator="cuda")).world_size == 2


def test_only_the_first_process_of_all_machines_speaks(torchrun, monkeypatch):
    assert not is_first_process()
    monkeypatch.setenv("RANK", "0")
    assert is_first_process()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # a RANK that torchrun has not set says nothing
    monkeypatch.setenv("RANK", "4")
    assert is_first_process()


def test_each_rank_draws_numbers_of_its_own():
    def draw(rank, step):
        fabric = SimpleNamespace(global_rank=rank, seed_everything=lambda seed, verbose: torch.manual_seed(seed))
        seed_rank(fabric, 5, step)
        return torch.rand(2).tolist()

    draws = [draw(rank, step) for rank in (1, 2) for step in (0, 7)]
    assert len({tuple(numbers) for numbers in draws}) == 4
    assert draw(2, 7) == draws[3]
    # One process is what it always was: its numbers are the seed's, whatever the step.
    assert draw(0, 7) == torch.rand(2, generator=torch.Generator().manual_seed(5)).tolist()
