"""Runs on 1, 2 and 3 processes: the same run, wherever it is stopped and with however many it goes on."""

import shutil
import signal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from launched import run_phases

from iecl_fast.engine import build
from iecl_fast.engine.batches import EpochBatches
from iecl_fast.engine.checkpoint import load_checkpoint
from iecl_fast.engine.config import resolve
from iecl_fast.engine.logging import read_metrics
from iecl_fast.engine.plan import count_steps
from iecl_fast.engine.traffic import bytes_received
from iecl_fast.ssl import METHODS, accepts
from small_runs import SMALL_RUN
from test_pretrain import assert_same_run

# 48 images in batches of 6, two for a step: 4 steps an epoch, 12 in all. The queue of 32 wraps.
RUN = [
    *SMALL_RUN,
    "views.image_size=8",
    "trainer.batch_size=6",
    "trainer.accumulate=2",
    "ring.anneal_epochs=2",
    "schedule.warmup_epochs=0.5",
    "data.workers=0",  # spawned processes would spawn theirs, each importing torch anew
]
COUNTED = {
    "moco": ["method.symmetric=true"],
    "iecl": ["saib.patch_size=4"],
    "simclr": ["saib.patch_size=4"],
    "byol": ["saib.patch_size=4"],
    "simsiam": [],
    "ir": ["method.loss=nce", "method.num_samples=4"],
    "cmc": ["method.num_samples=4"],
    "la": ["method.num_samples=4", "method.num_clusters=4"],
}


def counted_config(name):
    overrides = {"name": name, "dim": 8} | ({"num_keys": 32} if accepts(name, "num_keys") else {})
    values = {"method": overrides, "views": {"image_size": 8}, "encoder": {"width": 2}, "data": {"limit": 48}}
    values["trainer"] = {"batch_size": 6, "accumulate": 2}
    for text in COUNTED[name]:
        group, key = text.partition("=")[0].split(".")
        values.setdefault(group, {})[key] = yaml.safe_load(text.partition("=")[2])
    return resolve(values)


def count_traffic(rank):
    """For each method what a rank receives in one step of two passes: what a dry run says of it, and what came."""
    return {name: _count_traffic(counted_config(name), dist.get_world_size()) for name in METHODS}


def _count_traffic(config, size):
    torch.manual_seed(0)
    n = count_steps(config, 48, size).images_per_pass
    method = build.method(config, total_steps=9, batch_size=n, num_images=48, world_size=size)
    said = bytes_received(config, method, images_per_pass=n, world_size=size)
    counted = []
    all_gather, all_reduce = dist.all_gather, dist.all_reduce

    def gather(parts, tensor):
        if tensor.numel() > 1:  # else it is how many rows there are
            counted.append((size - 1) * tensor.numel() * tensor.element_size())
        return all_gather(parts, tensor)

    def reduce(tensor):
        counted.append(2 * (size - 1) * tensor.numel() * tensor.element_size() // size)
        return all_reduce(tensor)

    with mock.patch.object(dist, "all_gather", gather), mock.patch.object(dist, "all_reduce", reduce):
        for _ in range(2):
            views = [torch.randn(n, 3, 8, 8) for _ in range(method.num_views)]
            sum(method(views, torch.arange(n)).values()).backward()
        method.after_step()
    return {"said": sum(said.values()) - said["gradients"], "counted": sum(counted)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of the runs, and what was noted of each."""
    folder = tmp_path_factory.mktemp("ranks")

    def new(name, *overrides):
        return ["pretrain", "--output", str(folder / name), *RUN, *overrides]

    def resume(name):
        return ["pretrain", "--resume", str(folder / name)]

    phases = {
        "one": (1, new("one"), None),
        "two": (2, new("two"), None),
        "stopped": (2, new("stopped"), (5, signal.SIGTERM)),
        "stopped, on 2": (2, resume("on2"), None),
        "stopped, on 3": (3, resume("on3"), (9, signal.SIGTERM)),
        "stopped, on 3, on 1": (1, resume("on3"), None),
        "traffic": (3, count_traffic, None),
    }
    names = list(phases)

    def before(number):
        if names[number] == "stopped, on 2":
            shutil.copytree(folder / "stopped", folder / "on2")
            shutil.copytree(folder / "stopped", folder / "on3")
        if names[number] == "stopped, on 3, on 1":
            shutil.copytree(folder / "on3", folder / "on3_stopped")

    noted = run_phases(list(phases.values()), folder, before)
    return folder, dict(zip(names, noted, strict=True))


CHAINS = {
    "one": ("one", ["one"]),
    "two": ("two", ["two"]),
    "two, then two": ("on2", ["stopped", "stopped, on 2"]),
    "two, then three, then one": ("on3", ["stopped", "stopped, on 3", "stopped, on 3, on 1"]),
}


def test_they_end_as_they_should(runs):
    _, noted = runs
    stopped = ("stopped", "stopped, on 3")
    for name, ranks in noted.items():
        if name != "traffic":
            assert [rank["result"] for rank in ranks] == [143 if name in stopped else 0] * len(ranks), name


@pytest.mark.parametrize("chain", CHAINS)
def test_every_epoch_has_each_image_once_in_the_order_of_one_process(runs, chain):
    _, noted = runs
    passes = []
    for phase in CHAINS[chain][1]:
        for of_ranks in zip(*(rank["seen"] for rank in noted[phase]), strict=True):
            steps = {seen["step"] for seen in of_ranks}
            assert len(steps) == 1
            assert len({len(seen["index"]) for seen in of_ranks}) == 1  # equal parts
            passes.append((steps.pop(), torch.cat([seen["index"] for seen in of_ranks]).tolist()))
    expected = [
        (4 * epoch + number // 2, batch)
        for epoch in range(3)
        for number, batch in enumerate(EpochBatches(48, 6, seed=0, epoch=epoch))
    ]
    assert passes == expected
    for epoch in range(3):
        images = [index for step, batch in passes if step // 4 == epoch for index in batch]
        assert sorted(images) == list(range(48))


@pytest.mark.parametrize("chain", CHAINS)
def test_losses_and_schedules_are_those_of_one_process(runs, chain):
    """The backbone has no batch norm: to the rounding of float32 the curve is the same."""
    folder, _ = runs
    rows, expected = (read_metrics(folder / name / "metrics.csv") for name in (CHAINS[chain][0], "one"))
    exact = ("step", "epoch", "learning_rate", "ring_lower", "ring_upper", "queue_filled")
    assert [[row[name] for name in exact] for row in rows] == [[row[name] for name in exact] for row in expected]
    losses, wanted = (torch.tensor([row["loss"] for row in table], dtype=torch.float32) for table in (rows, expected))
    torch.testing.assert_close(losses, wanted)
    states = [load_checkpoint(folder / name / "checkpoints" / "last.ckpt") for name in (CHAINS[chain][0], "one")]
    assert states[0]["step"] == states[1]["step"] == 12
    torch.testing.assert_close(states[0]["method"], states[1]["method"])
    momenta = [[part["momentum_buffer"] for part in state["optimizer"]["state"].values()] for state in states]
    torch.testing.assert_close(*momenta)


def test_resumed_on_as_many_it_is_the_uninterrupted_run_bit_for_bit(runs):
    folder, _ = runs
    assert_same_run(folder / "on2", folder / "two")


def test_all_ranks_have_the_same_queue_at_every_step(runs):
    _, noted = runs
    for name, ranks in noted.items():
        for of_ranks in zip(*(rank["seen"] for rank in ranks), strict=True):
            assert all(torch.equal(seen["queue"], of_ranks[0]["queue"]) for seen in of_ranks), name


@pytest.mark.parametrize(
    ("source", "phase", "step"), [("stopped", "stopped, on 3", 5), ("on3_stopped", "stopped, on 3, on 1", 9)]
)
def test_every_rank_starts_from_the_checkpoint_with_numbers_of_its_own(runs, source, phase, step):
    folder, noted = runs
    saved = load_checkpoint(folder / source / "checkpoints" / "last.ckpt")
    assert saved["step"] == step
    first = [rank["seen"][0] for rank in noted[phase]]
    for rank, seen in enumerate(first):
        assert seen["step"] == step
        assert seen["state"].keys() == saved["method"].keys()
        assert all(torch.equal(value, seen["state"][name]) for name, value in saved["method"].items())
        if rank < len(saved["rng"]):  # a rank that was there goes on where it was
            assert torch.equal(seen["rng"], saved["rng"][rank]["torch"])
    states = {tuple(seen["rng"].tolist()) for seen in first}
    assert len(states) == len(first)


def test_ranks_of_a_new_run_draw_different_numbers(runs):
    _, noted = runs
    one, two = noted["one"][0]["seen"][0]["rng"], [rank["seen"][0]["rng"] for rank in noted["two"]]
    assert torch.equal(one, two[0]) and not torch.equal(*two)


@pytest.mark.parametrize("name", METHODS)
def test_the_traffic_is_what_a_dry_run_says(runs, name):
    _, noted = runs
    for rank in noted["traffic"]:
        traffic = rank["result"][name]
        assert traffic["said"] == traffic["counted"] > 0 or (name == "simsiam" and not any(traffic.values()))
