"""What a run goes past: unreadable images, steps without a finite loss. And what stops it: too many of them."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from class_folders import make_class_folders
from iecl_fast.cli import main
from iecl_fast.data import Readable
from iecl_fast.engine import faults
from iecl_fast.engine.checkpoint import load_checkpoint
from iecl_fast.engine.errors import RunError
from iecl_fast.engine.faults import Faults
from iecl_fast.engine.logging import RunLog, read_metrics
from iecl_fast.ssl import InstanceDiscrimination, MoCo
from test_pretrain import assert_same_run, kill_at, result, weights

BROKEN = ("train/dark/3.png", "train/light/5.png", "test/dark/1.png")


@pytest.fixture
def photos(tmp_path):
    """Images in class folders; two for training are damaged, one cut short and one no image, and one for testing."""
    root = make_class_folders(tmp_path / "photos", {"dark": 40, "light": 200}, {"train": 12, "test": 6})
    for name in BROKEN:
        content = (root / name).read_bytes()
        (root / name).write_bytes(b"no image" if "5" in name else content[: len(content) // 2])
    return root


class Items:
    """Ten items, of which some raise."""

    def __init__(self, broken):
        self.broken = broken

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError(f"{index}.png: line one\nline two")
        return 10.0 * index, index


def test_another_item_comes_in_place_of_an_unreadable_one_always_the_same():
    data = Readable(Items({3, 4}), limit=5)
    assert data[7] == (70.0, 7, "")
    value, index, text = data[3]
    assert index not in (3, 4) and value == 10 * index
    assert text.splitlines()[0] == "3.png: line one line two"
    assert data[3] == (value, index, text)


def test_an_item_whose_substitutes_are_unreadable_too():
    data = Readable(Items(set(range(10)) - {8}), limit=100)
    value, index, text = data[2]
    assert (value, index) == (80.0, 8)
    assert len(text.splitlines()) >= 1 and text.startswith("2.png")
    with pytest.raises(OSError, match=r"\.png"):
        Readable(Items(set(range(10))), limit=3)[2]
    with pytest.raises(OSError, match=r"^2\.png"):
        Readable(Items({2}), limit=0)[2]


class OneProcess:
    world_size, is_global_zero = 1, True


def test_each_image_is_named_once_and_the_limit_lists_them(capsys):
    found = Faults(OneProcess(), max_unreadable=2)
    found.note(["", "a.png: bad", "b.png: bad\na.png: bad"])
    found.agree()
    found.note(["a.png: bad"])
    found.agree()
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition("left out: ")[2] for line in lines] == ["a.png: bad", "b.png: bad"]
    restored = Faults(OneProcess(), max_unreadable=2)
    restored.load_state_dict(found.state_dict())
    restored.note(["b.png: bad", "c.png: bad"])
    with pytest.raises(RunError, match=r"3 images.*max_unreadable=2(.|\n)*a\.png(.|\n)*b\.png(.|\n)*c\.png"):
        restored.agree()


def test_a_long_list_is_cut(monkeypatch):
    monkeypatch.setattr(faults, "LISTED", 2)
    found = Faults(OneProcess())
    found.note([f"{number}.png" for number in range(5)])
    with pytest.raises(RunError, match=r"^5 images.*\n  0\.png\n  1\.png\n  \.\.\.$"):
        found.agree()


def test_unreadable_images_are_named_counted_and_replaced_and_a_resumed_run_is_the_same(
    small_run, photos, tmp_path, monkeypatch, capsys
):
    overrides = ["--data", str(photos), "data.limit=null", "data.max_unreadable=3"]
    assert main(small_run("whole", *overrides)) == 0
    lines = capsys.readouterr().err.splitlines()
    for name in BROKEN:
        assert sum(name in line for line in lines) == 1
    assert result(tmp_path / "whole")["unreadable_images"] == 3
    assert result(tmp_path / "whole")["steps"] == 9  # 24 images, three batches an epoch
    rows = read_metrics(tmp_path / "whole" / "metrics.csv")
    assert [row["unreadable_images"] for row in rows] == [3] * 9

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", kill_at(5, signal.SIGTERM))
        assert main(small_run("halted", *overrides)) == 143
    capsys.readouterr()
    assert main(["pretrain", "--resume", str(tmp_path / "halted")]) == 0
    assert_same_run(tmp_path / "halted", tmp_path / "whole")
    assert not any(name in capsys.readouterr().err for name in BROKEN)  # each is named once in a run

    (tmp_path / "whole" / "result.json").unlink()
    assert main(["evaluate", "knn", "--checkpoint", str(tmp_path / "whole"), "--output", str(tmp_path / "out")]) == 0
    evaluated = json.loads((tmp_path / "out" / "result.json").read_text())
    assert evaluated["unreadable_images"] == 3
    assert evaluated["knn_top1"] == result(tmp_path / "halted")["knn_top1"]


def test_too_many_unreadable_images_are_listed_and_a_higher_limit_goes_on(small_run, photos, tmp_path, capsys):
    assert main(small_run("run", "--data", str(photos), "data.limit=null", "data.max_unreadable=2")) == 1
    lines = capsys.readouterr().err.partition("are allowed:")[2].splitlines()
    for name in BROKEN:
        assert sum(name in line for line in lines) == 1
    assert main(["pretrain", "--resume", str(tmp_path / "run"), "data.max_unreadable=3"]) == 0
    assert result(tmp_path / "run")["unreadable_images"] == 3


def poison(monkeypatch, method, steps, where):
    """Make the views, the loss or the gradient of some steps NaN."""

    def forward(self, views, index=None):
        at = int(self.step) + 1 in steps
        if at and where == "views":
            views = [view * torch.nan for view in views]
        losses = original(self, views, index)
        if at and where == "loss":
            losses = {name: loss * torch.nan for name, loss in losses.items()}
        if at and where == "gradient":
            losses["contrast"].register_hook(lambda gradient: gradient * torch.nan)
        return losses

    original = method.forward
    monkeypatch.setattr(method, "forward", forward)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nan_between_logged_steps_reaches_no_checkpoint(small_run, whole_run, tmp_path, monkeypatch, capsys, where):
    """Of the gradient it is only seen in the weights. Step 4 is neither logged nor the end of an epoch."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        poison(patch, MoCo, {4}, where)
        overrides = ["trainer.log_steps=1000", f"trainer.checkpoint_steps={3 if where == 'loss' else 1}"]
        assert main(small_run("run", *overrides)) == 1
    message = capsys.readouterr().err
    assert "since step 4" in message and "optimizer.lr" in message
    assert "the checkpoint of step 3 is kept" in message
    state = load_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert state["step"] == 3
    assert all(tensor.isfinite().all() for tensor in state["method"].values())
    assert main(["pretrain", "--resume", str(folder)]) == 0
    for name, tensor in weights(whole_run).items():
        assert torch.equal(tensor, weights(folder)[name]), name


@pytest.mark.parametrize(
    ("method", "where"), [(MoCo, "views"), (MoCo, "gradient"), (InstanceDiscrimination, "views")], ids=str
)
def test_a_skipped_step_leaves_all_as_it_was(small_run, states, tmp_path, monkeypatch, capsys, method, where):
    poison(monkeypatch, method, {4, 5}, where)
    overrides = ["trainer.nan_loss=skip", "trainer.checkpoint_steps=1", "trainer.epochs=2", "optimizer.momentum=0.9"]
    if method is InstanceDiscrimination:
        overrides += ["--method", "ir", "method.dim=8", "method.num_samples=8", "method.loss=nce"]
    arguments = small_run("run", *overrides)
    if method is InstanceDiscrimination:
        arguments = [word for word in arguments if not word.startswith("method.num_keys")]
    assert main(arguments) == 0
    message = capsys.readouterr().err
    assert "step 4 is left out" in message and "step 5 is left out" in message

    before, after = states[3], states[5]
    assert (after["step"], after["faults"]["skipped_steps"], after["faults"]["skipped_in_a_row"]) == (5, 2, 2)
    assert int(after["method"].pop("step")) == 5 and int(before["method"].pop("step")) == 3
    for name, tensor in before["method"].items():
        assert torch.equal(tensor, after["method"][name]), name
    for number, slots in before["optimizer"]["state"].items():
        assert torch.equal(slots["momentum_buffer"], after["optimizer"]["state"][number]["momentum_buffer"])
    moved = [not torch.equal(tensor, states[6]["method"][name]) for name, tensor in before["method"].items()]
    assert sum(moved) > len(moved) / 2
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert [(row["step"], row["skipped_steps"]) for row in rows[2:4]] == [(3, 0), (6, 2)]
    assert result(tmp_path / "run")["skipped_steps"] == 2


def test_too_many_skipped_steps_in_a_row_stop_the_run(small_run, tmp_path, monkeypatch, capsys):
    poison(monkeypatch, MoCo, {2, 4, 5, 6, 7}, "loss")
    assert main(small_run("run", "trainer.nan_loss=skip", "trainer.max_skipped=2")) == 1
    message = capsys.readouterr().err
    assert "3 steps in a row up to step 6" in message
    assert "the checkpoint of step 0 is kept" in message
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.csv")] == [1, 3]


POISONED_ON_RANK_1 = """
import sys
sys.path.insert(0, {here!r})
import torch
from iecl_fast.cli import main
from iecl_fast.ssl import MoCo
forward = MoCo.forward
def poisoned(self, views, index=None):
    if int(self.step) == 4 and torch.distributed.get_rank() == 1:
        views = [view * torch.nan for view in views]
    return forward(self, views, index)
MoCo.forward = poisoned
sys.exit(main())
"""


def test_ranks_skip_and_count_together(small_run, photos, tmp_path):
    """The loss is NaN on one of two, and each reads its own part of the damaged images: one decision, one count."""
    script = tmp_path / "poisoned.py"
    script.write_text(POISONED_ON_RANK_1.format(here=str(Path(__file__).parent)))
    arguments = small_run(
        "run",
        *("--data", str(photos), "data.limit=null", "data.max_unreadable=3"),
        *("trainer.devices=2", "trainer.accelerator=cpu", "trainer.nan_loss=skip"),
    )
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("step 5 is left out") == 1
    for name in BROKEN:
        assert sum(name in line for line in done.stderr.splitlines()) == 1
    values = result(tmp_path / "run")
    assert (values["skipped_steps"], values["unreadable_images"], values["steps"]) == (1, 3, 9)
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.csv")] == [1, 2, 3, 4, 6, 7, 8, 9]
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run").values())


def test_a_killed_worker_is_said_and_the_run_goes_on_exactly(small_run, whole_run, tmp_path, monkeypatch, capsys):
    def write(self, step, *arguments):
        original(self, step, *arguments)
        if step == 8:
            for worker in psutil.Process().children():
                worker.kill()
                worker.wait()

    original = RunLog.write
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", write)
        assert main(small_run("run", "data.workers=1")) == 1
    message = capsys.readouterr().err
    assert "DataLoader worker" in message and "data.workers" in message
    assert "the checkpoint of step 6 is kept" in message
    assert "Traceback" not in message
    assert main(["pretrain", "--resume", str(tmp_path / "run"), "data.workers=0"]) == 0
    assert_same_run(tmp_path / "run", whole_run)
