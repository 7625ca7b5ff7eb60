"""The command line: exit status, messages without tracebacks, and what each command prints and writes."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import yaml

from class_folders import make_class_folders
from iecl_fast import __version__
from iecl_fast.cli import main

TINY = [
    "encoder.stem=imagenet",
    "encoder.width=2",
    "method.dim=8",
    "method.num_keys=32",
    "trainer.progress=false",
    "evaluate.linear_iterations=10",
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Images that are told apart by their brightness."""
    root = tmp_path_factory.mktemp("data") / "photos"
    return make_class_folders(root, {"dark": 40, "light": 200}, {"train": 8, "test": 4})


@pytest.fixture(scope="module")
def run(tmp_path_factory, photos):
    """A finished run on that tree."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    arguments = ["--data", str(photos), "--epochs", "2", "--batch-size", "8", "--seed", "3", "--output", str(folder)]
    assert main(["pretrain", *arguments, *TINY]) == 0
    return folder


def test_a_folder_of_images_trains_and_the_named_options_arrive(run, photos):
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["data"]["name"] == str(photos)
    assert (config["trainer"]["epochs"], config["trainer"]["batch_size"], config["seed"]) == (2, 8, 3)
    assert config["views"]["image_size"] == 24
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == 4
    assert result["data"] == str(photos)
    assert result["knn_k"] == 16


@pytest.mark.parametrize("protocol", ["knn", "linear"])
@pytest.mark.parametrize("place", ["", "checkpoints/last.ckpt"])
def test_evaluate_gives_what_the_run_ended_with(run, tmp_path, capsys, protocol, place):
    assert main(["evaluate", protocol, "--checkpoint", str(run / place), "--output", str(tmp_path / "out")]) == 0
    evaluated = json.loads((tmp_path / "out" / "result.json").read_text())
    result = json.loads((run / "result.json").read_text())
    names = [name for name in result if name.startswith(f"{protocol}_") and "untrained" not in name]
    assert len(names) == {"knn": 4, "linear": 5}[protocol]
    assert {name: evaluated[name] for name in names} == {name: result[name] for name in names}
    assert f"{protocol}_top1" in capsys.readouterr().out


def test_evaluate_on_other_data_and_with_other_values(run, capsys):
    arguments = ["--checkpoint", str(run), "--data", "digits", "evaluate.knn_k=3", "data.limit=100"]
    assert main(["evaluate", "knn", *arguments]) == 0
    words = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert words["data"] == "digits"
    assert words["knn_k"] == "3"
    assert words["knn_top1"].endswith(" %")


def test_evaluate_does_not_overwrite(run, tmp_path, capsys):
    (tmp_path / "result.json").write_text("{}")
    assert main(["evaluate", "knn", "--checkpoint", str(run), "--output", str(tmp_path)]) == 2
    assert "not overwritten" in capsys.readouterr().err
    assert (tmp_path / "result.json").read_text() == "{}"


def test_evaluate_leaves_a_run_folder_alone(run, tmp_path, capsys):
    """Of a run that is not finished yet the result would count as its own."""
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    assert main(["evaluate", "knn", "--checkpoint", str(run), "--output", str(tmp_path)]) == 2
    assert "it is a run's folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "knn", "--checkpoint", ""],
        ["evaluate", "knn", "--checkpoint", "a", "--output", ""],
        ["evaluate", "knn", "--checkpoint", "a", "--data", ""],
        ["export", "a", "--format", "torchvision", "--output", ""],
        ["report", "a", "--output", " "],
        ["sweep", "digits", "--output", ""],
        ["pretrain", "--resume", ""],
    ],
)
def test_an_empty_name_is_not_the_working_directory(arguments, capsys):
    assert main(arguments) == 2
    assert "is not allowed, it must name a file or folder" in capsys.readouterr().err


def test_pretrain_without_output_makes_a_folder_under_runs(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", "--data", str(photos), "--epochs", "1", "--method", "moco", *TINY]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("moco-photos-")
    out = capsys.readouterr().out
    assert "untrained" in out
    assert "kNN, k=16" in out
    assert folder.name in out


def test_recipe_file_with_options_over_it(photos, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"data: {{name: {photos}}}\ntrainer: {{epochs: 5, batch_size: 4}}\nseed: 9\n")
    arguments = ["--config", str(tmp_path / "mine.yaml"), "--epochs", "1", "--output", str(tmp_path / "run"), *TINY]
    assert main(["pretrain", *arguments, "trainer.batch_size=16", "trainer.log_steps=1"]) == 0
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["seed"], config["trainer"]["epochs"], config["trainer"]["batch_size"]) == (9, 1, 16)
    assert config["ring"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pretran"], "did you mean pretrain?"),
        (["pretrain", "--epocs", "3"], "did you mean --epochs?"),
        (["pretrain", "--epochs", "three"], "--epochs: invalid int value: 'three'"),
        (["pretrain", "--epochs", "0"], "trainer.epochs: 0 is not allowed, it must be at least 1"),
        (["pretrain", "--batch-size", "-3"], "trainer.batch_size"),
        (["pretrain", "evaluate.batch_size=100000000000000000000000"], "evaluate.batch_size"),
        (["pretrain", "data.workers=100000000"], "data.workers: 100000000 is not allowed, it must be at least 0 and"),
        (["pretrain", "--method", "mocoo"], "did you mean moco?"),
        (["pretrain", "--method", "byol", "method.num_keys=8"], "there is no key method.num_keys"),
        (["pretrain", "--method", "simsiam", "ring.upper=90"], "ring: simsiam takes no ring"),
        (["pretrain", "--data", "digts"], "did you mean digits?"),
        (["pretrain", "--data", "no/such/folder"], "no/such/folder"),
        (["pretrain", "--config", "no.yaml"], "there is no file no.yaml"),
        (["pretrain", "--config", ""], "--config: there is no file"),
        (["pretrain", "temperature=0.2"], "did you mean method.temperature?"),
        (["pretrain", "method.temperatur=0.2"], "did you mean method.temperature?"),
        (["pretrain", "epochs"], "'epochs' is not an override"),
        (["pretrain", "--resume", "no-run"], "there is no run folder no-run"),
        (["pretrain", "--resume", "a", "--output", "b"], "give one of them"),
        (["evaluate", "--checkpoint", "x"], "protocol"),
        (["evaluate", "knm", "--checkpoint", "x"], "did you mean knn?"),
        (["evaluate", "knn"], "--checkpoint"),
        (["evaluate", "knn", "--checkpoint", "no.ckpt"], "there is no checkpoint no.ckpt"),
    ],
)
def test_usage_errors(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert words in message
    assert "Traceback" not in message
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_without_a_checkpoint(tmp_path, capsys):
    assert main(["evaluate", "knn", "--checkpoint", str(tmp_path)]) == 2
    assert "last.ckpt" in capsys.readouterr().err
    assert main(["pretrain", "--resume", str(tmp_path)]) == 2
    assert "has no config.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["encoder.width=4", "method.dim=9", "method.temperature=0.3", "ring.upper=50"])
def test_evaluate_cannot_change_the_encoder(run, capsys, key):
    assert main(["evaluate", "knn", "--checkpoint", str(run), key]) == 2
    assert f"{key.partition('.')[0]} cannot be changed" in capsys.readouterr().err


def test_an_output_below_a_file_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["pretrain", "--output", str(tmp_path / "file" / "run")]) == 2
    assert "cannot be made" in capsys.readouterr().err


def test_a_full_disk_is_a_message(photos, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    assert main(["pretrain", "--data", str(photos), "--output", str(tmp_path / "run"), *TINY]) == 1
    message = capsys.readouterr().err
    assert "last.ckpt: No space left on device; go on with: iecl-fast pretrain --resume" in message
    assert "Traceback" not in message


def test_too_little_memory_is_a_message(photos, tmp_path, capsys):
    arguments = ["--data", str(photos), "--output", str(tmp_path / "run"), *TINY, "method.num_keys=100000000000000"]
    assert main(["pretrain", *arguments]) == 1
    message = capsys.readouterr().err
    assert "not enough memory" in message
    assert "Traceback" not in message


def test_a_broken_image_is_a_message_with_its_trouble(photos, tmp_path, capsys):
    copy = shutil.copytree(photos, tmp_path / "copy")
    (copy / "train" / "dark" / "3.png").write_bytes(b"no image")
    arguments = ["--data", str(copy), "--output", str(tmp_path / "run"), *TINY, "data.max_unreadable=0"]
    assert main(["pretrain", *arguments]) == 1
    message = capsys.readouterr().err
    assert "3.png" in message
    assert "Traceback" not in message


def test_a_recipe_that_is_a_folder_or_unreadable_text(tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("trainer: [1\n")
    assert main(["pretrain", "--config", str(tmp_path / "bad.yaml")]) == 2
    assert "not valid YAML" in capsys.readouterr().err
    assert main(["pretrain", "--config", str(tmp_path)]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_keyboard_interrupt_outside_a_run(monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("iecl_fast.engine.config.read_recipe", interrupt)
    assert main(["pretrain"]) == 130
    assert capsys.readouterr().err == "iecl-fast: interrupted\n"


@pytest.mark.parametrize("command", [["pretrain"], ["evaluate"], ["sweep"], ["report"], ["doctor"], []])
def test_help(command, capsys):
    assert main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: iecl-fast")
    for line in text.splitlines():
        assert len(line) <= 120, line


def test_help_of_pretrain_lists_recipes_keys_and_examples(capsys):
    main(["pretrain", "--help"])
    text = capsys.readouterr().out
    for words in ("examples:", "--resume DIR", "digits", "method.temperature=", "result.json"):
        assert words in text


def test_no_command_prints_help(capsys):
    assert main([]) == 2
    assert "iecl-fast pretrain" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"iecl-fast {__version__}\n"


def test_doctor(capsys):
    assert main(["doctor"]) == 0
    assert "torch" in capsys.readouterr().out


def test_as_a_process():
    done = subprocess.run([sys.executable, "-m", "iecl_fast.cli", "pretrain", "seed=x"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "iecl-fast: seed: 'x' is not allowed, it must be a whole number\n"
