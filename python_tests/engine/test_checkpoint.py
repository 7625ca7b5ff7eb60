"""Checkpoints: whole or not at all, nothing but data in them, random states exactly."""

import os
import pickle
import random
import resource

import numpy as np
import pytest
import torch

from iecl_fast import __version__
from iecl_fast.engine import checkpoint
from iecl_fast.engine.checkpoint import (
    get_rng_state,
    load_checkpoint,
    load_part,
    save_checkpoint,
    set_rng_state,
    whole_file,
)
from iecl_fast.engine.errors import UsageError

CPU = torch.device("cpu")
NO_FAULTS = {"unreadable": [], "skipped_steps": 0, "skipped_in_a_row": 0}
EMPTY = {
    **{name: {} for name in ("config", "method", "optimizer", "precision", "versions")},
    "faults": NO_FAULTS,
    "rng": [],
    "samples": 1,
    "seconds": 0.5,
    "step": 0,
    "untrained": None,
}


def test_round_trip(tmp_path):
    state = {**EMPTY, "tensor": torch.arange(5.0), "nested": {"list": [1, "a", None], "pair": (0.1, True)}}
    save_checkpoint(tmp_path / "last.ckpt", state)
    loaded = load_checkpoint(tmp_path / "last.ckpt")
    assert torch.equal(loaded.pop("tensor"), state["tensor"])
    assert loaded == {**EMPTY, "format": checkpoint.FORMAT, "nested": state["nested"]}
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_a_failure_while_writing_leaves_the_old_file(tmp_path, monkeypatch, where):
    path = tmp_path / "last.ckpt"
    save_checkpoint(path, {**EMPTY, "step": 1})
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    if where == "write":
        monkeypatch.setattr(torch, "save", lambda state, file: (file.write(b"half"), fail()))
    else:
        monkeypatch.setattr(os, where, fail)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(path, {**EMPTY, "step": 2})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_until_the_end_the_new_file_does_not_have_the_name(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def zeros_in_the_middle(path):
    data = bytearray(path.read_bytes())
    data[100:400] = bytes(300)
    path.write_bytes(data)


class Code:
    def __reduce__(self):
        return (os.system, ("true",))


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        zeros_in_the_middle,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("something else"),
        lambda path: torch.save([1, 2], path),
        lambda path: torch.save({"weights": 1}, path),
        lambda path: torch.save({"format": 99}, path),
        lambda path: torch.save({"format": "1"}, path),
        lambda path: torch.save({"format": 1}, path),
        lambda path: torch.save({**EMPTY, "format": 2, "step": "7"}, path),
        lambda path: torch.save({"format": 1, "code": Code()}, path),
        lambda path: path.write_bytes(pickle.dumps(Code())),
        lambda path: path.unlink(),
    ],
    ids=[
        "cut",
        "overwritten",
        "empty",
        "text",
        "list",
        "foreign",
        "format",
        "text",
        "incomplete",
        "types",
        "code",
        "pickle",
        "missing",
    ],
)
def test_a_damaged_or_foreign_file_is_said_with_its_name(tmp_path, damage):
    path = tmp_path / "last.ckpt"
    save_checkpoint(path, {**EMPTY, "tensor": torch.zeros(100)})
    damage(path)
    with pytest.raises(UsageError, match=r"last\.ckpt") as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_no_flipped_bit_goes_unnoticed(tmp_path):
    """Either the file is refused by name, or the bit means nothing and all is as it was."""
    path = tmp_path / "last.ckpt"
    state = {**EMPTY, "method": {"weight": torch.arange(300.0)}, "config": {"seed": 7}}
    save_checkpoint(path, state)
    whole, chance = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            loaded = load_checkpoint(path)
        except UsageError as error:
            refused += 1
            assert "last.ckpt" in str(error)
        else:
            assert torch.equal(loaded["method"].pop("weight"), state["method"]["weight"])
            assert loaded == {**EMPTY, "format": checkpoint.FORMAT, "method": {}, "config": {"seed": 7}}
    assert refused > 100


def test_a_newer_version_is_named(tmp_path):
    path = tmp_path / "last.ckpt"
    torch.save({**EMPTY, "format": 3, "versions": {"iecl_fast": "9.1"}}, path)
    with pytest.raises(UsageError, match=rf"format 3, written by iecl_fast 9\.1; iecl_fast {__version__} reads"):
        load_checkpoint(path)


def test_format_1_is_read_as_the_present_one(tmp_path):
    path = tmp_path / "last.ckpt"
    torch.save({**{name: part for name, part in EMPTY.items() if name != "faults"}, "format": 1}, path)
    assert load_checkpoint(path) == {**EMPTY, "format": checkpoint.FORMAT}


def test_no_code_runs(tmp_path):
    """weights_only is what keeps it from running: the same file unpickled in full does run it."""
    path, trace = tmp_path / "last.ckpt", tmp_path / "trace"
    torch.save({**EMPTY, "format": checkpoint.FORMAT, "code": Touch(str(trace))}, path)
    with pytest.raises(
        UsageError, match=r"last\.ckpt is no checkpoint .*: it holds more than tensors and plain values"
    ):
        load_checkpoint(path)
    assert not trace.exists()
    torch.load(path, weights_only=False)
    assert trace.exists()


def test_leftovers_of_a_kill_are_removed_and_nothing_else(tmp_path):
    for name in (".last.ckpt.tmp", ".config.yaml.tmp", "mine.tmp", ".hidden", "last.ckpt"):
        (tmp_path / name).write_text("")
    checkpoint.remove_leftovers(tmp_path, tmp_path / "missing")
    assert {path.name for path in tmp_path.iterdir()} == {"mine.tmp", ".hidden", "last.ckpt"}


def test_random_states_come_back_from_a_file(tmp_path):
    def draw():
        return random.random(), np.random.rand(), torch.rand(3).tolist(), np.random.randn()

    np.random.randn()  # leaves a cached second number, which is part of the state
    save_checkpoint(tmp_path / "c", {**EMPTY, "rng": [get_rng_state(CPU)]})
    expected = draw()
    draw()
    set_rng_state(load_checkpoint(tmp_path / "c")["rng"][0], CPU)
    assert draw() == expected


@pytest.mark.parametrize("damage", [{}, {"python": 1}, {"torch": torch.zeros(3)}, {"numpy": ("MT19937",)}, None])
def test_damaged_random_states_are_said(damage):
    before = torch.get_rng_state()
    state = None if damage is None else {**get_rng_state(CPU), **damage} if damage else {}
    with pytest.raises(UsageError, match="random generators are damaged"):
        set_rng_state(state, CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_the_system_says_of_a_failed_write_is_said(tmp_path):
    path = tmp_path / "last.ckpt"
    save_checkpoint(path, {**EMPTY, "step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # a disk that is full in the middle of the file
    try:
        with pytest.raises(OSError, match="File too large"):
            save_checkpoint(path, {**EMPTY, "step": 2, "weights": torch.zeros(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert load_checkpoint(path)["step"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_part_of_something_else_is_said_with_its_name(tmp_path):
    layer = torch.nn.Linear(2, 2)
    for state in ({}, {"weight": torch.zeros(3, 3), "bias": torch.zeros(2)}, None):
        with pytest.raises(UsageError, match=r"last\.ckpt does not fit Linear"):
            load_part(layer, state, tmp_path / "last.ckpt")
