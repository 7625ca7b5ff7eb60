"""No half a file, no half a load, nothing overwritten, no code run; and what the messages say."""

import builtins
import os
import pickle
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from iecl_fast.cli import main
from iecl_fast.engine.errors import UsageError
from iecl_fast.evaluate import detectron2, export
from iecl_fast.evaluate.export import FORMATS, export_checkpoint, load_backbone, load_strictly
from iecl_fast.ssl import build_backbone


def written(state, file_format, path):
    """A file of a format with those tensors, whatever they are."""
    content = export.BackboneFile(state, "resnet18", "imagenet", 2, (0.5,) * 3, (0.5,) * 3, 1)
    path.write_bytes(export._encode(content, file_format))
    return path


@pytest.fixture
def state(small_run):
    return {name: tensor.clone() for name, tensor in small_run[1].state_dict().items()}


def in_file(name, file_format):
    return detectron2.detectron2_name(name) if file_format == "detectron2" else name


@pytest.mark.parametrize("file_format", FORMATS)
def test_missing_tensors_are_listed_and_refused(state, tmp_path, file_format):
    gone = ("layer2.0.downsample.1.bias", "bn1.running_mean")
    for name in gone:
        del state[name]
    path = written(state, file_format, tmp_path / "file")
    with pytest.raises(UsageError) as caught:
        load_backbone(path)
    message = str(caught.value)
    assert message.startswith(f"{path} does not fit ResNetBackbone: it lacks ") and "\n" not in message
    assert all(in_file(name, file_format) in message for name in gone) and "takes" not in message
    named = [in_file(name, file_format) for name in gone]
    with pytest.raises(UsageError, match=r"it lacks [^,]*bias$"):
        load_backbone(path, allow_missing=named[1:])
    loaded = load_backbone(path, allow_missing=named)
    assert torch.equal(loaded.conv1.weight, state["conv1.weight"])


@pytest.mark.parametrize("file_format", FORMATS)
def test_unexpected_tensors_are_listed_and_refused(state, tmp_path, file_format):
    state |= {"fc.weight": torch.zeros(3, 16), "fc.bias": torch.zeros(3)}
    path = written(state, file_format, tmp_path / "file")
    with pytest.raises(UsageError) as caught:
        load_backbone(path)
    named = ("stem.fc.weight", "stem.fc.bias") if file_format == "detectron2" else ("fc.weight", "fc.bias")
    listed = str(caught.value).partition("nothing takes ")[2].split(", ")
    assert sorted(listed) == sorted(named)
    with pytest.raises(UsageError, match=r"nothing takes (stem\.)?fc\.bias$"):
        load_backbone(path, allow_unexpected=named[:1])
    assert torch.equal(load_backbone(path, allow_unexpected=named).bn1.bias, state["bn1.bias"])


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(16, 16, 3, 1), "float32 (16, 16, 3, 1)"),
        (torch.zeros(16, 16, 3, 3, dtype=torch.float16), "float16 (16, 16, 3, 3)"),
        (torch.zeros(16, 16, 3, 3, dtype=torch.float64), "float64 (16, 16, 3, 3)"),
    ],
)
def test_another_shape_or_dtype_is_refused(state, tmp_path, file_format, value, words):
    state["layer4.1.conv2.weight"] = value
    path, name = written(state, file_format, tmp_path / "file"), in_file("layer4.1.conv2.weight", file_format)
    with pytest.raises(UsageError) as caught:
        load_backbone(path, allow_missing=(name,), allow_unexpected=(name,))
    assert f"of another kind are {name} ({words} instead of float32 (16, 16, 3, 3))" in str(caught.value)


def test_a_refused_load_changes_nothing():
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for state in ({"weight": other.weight}, {**other.state_dict(), "more": torch.zeros(1)}, {}):
        with pytest.raises(UsageError, match="something does not fit Linear"):
            load_strictly(module, state, "something")
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    load_strictly(module, {"weight": other.weight}, "something", allow_missing=["bias"])
    assert torch.equal(module.weight, other.weight) and torch.equal(module.bias, before["bias"])
    with pytest.raises(TypeError, match=r"allow_missing = 'bias' is not allowed: a list of names"):
        load_strictly(module, {"weight": other.weight}, "something", allow_missing="bias")


def test_a_network_with_another_number_of_blocks_is_refused(state, tmp_path):
    state = {name: tensor for name, tensor in state.items() if not name.startswith("layer3.1.")}
    with pytest.raises(UsageError, match=r"it lacks layer3\.1\.conv1\.weight, layer3\.1\.bn1\.weight"):
        load_backbone(written(state, "torchvision", tmp_path / "file"))
    state["conv1.weight"] = torch.zeros(2, 3, 5, 5)
    with pytest.raises(UsageError, match=r"conv1\.weight \(float32 \(2, 3, 5, 5\) instead of float32 \(2, 3, 3, 3\)"):
        load_backbone(written(state, "torchvision", tmp_path / "file"))


class Code:
    """What a hostile file may hold."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def cut(data):
    return data[: len(data) // 2]


def overwritten(data):
    return data[:20] + bytes(200) + data[220:]


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("damage", [cut, overwritten])
def test_a_damaged_file_is_said_with_its_name(state, tmp_path, file_format, damage):
    path = written(state, file_format, tmp_path / "file.x")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match=r"file\.x") as caught:
        load_backbone(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"),
        (b"something else", "cannot be read"),
        (b"\x80\x05.", "cannot be read as a Detectron2 pickle"),
        (pickle.dumps([1]), "it must hold a dict 'model'"),
        (pickle.dumps({"model": [1]}), "it must hold a dict 'model'"),
        (pickle.dumps({"model": {3: 1}}), "it must hold a dict 'model'"),
        (pickle.dumps({"model": {"conv1.weight": "x"}}), "conv1.weight: str is not allowed, it must be an array"),
        (pickle.dumps({"model": {"a": np.array([None])}}), "a: type 'O8' is not allowed, it must be one of f2, f4"),
        (pickle.dumps({"model": {"a": np.array(["x"])}}), "a: type 'U1' is not allowed"),
        (pickle.dumps({"model": {"a": np.float64(1)}}), r"it asks for numpy\.\S+\.scalar; allowed are NumPy's arrays"),
        (pickle.dumps({"model": {"a": np.zeros(1)}}), "lacks stem.conv1.weight"),
    ],
)
def test_a_foreign_file_is_said_with_its_name(tmp_path, content, words):
    path = tmp_path / "file.x"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words) as caught:
        load_backbone(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("data", [[1], {"a": 1}, {"a": {"b": torch.zeros(1)}}, {1: torch.zeros(1)}])
def test_a_torch_file_of_something_else(tmp_path, data):
    torch.save(data, tmp_path / "file")
    with pytest.raises(UsageError, match="is no state_dict"):
        load_backbone(tmp_path / "file")


@pytest.mark.parametrize("protocol", [2, 5])
def test_no_code_in_a_file_is_run(tmp_path, protocol):
    mark, path = tmp_path / "it ran", tmp_path / "file"
    hostile = {"model": {"conv1.weight": Code(mark)}, "__author__": "x", "matching_heuristics": True}
    path.write_bytes(pickle.dumps(hostile, protocol=protocol))
    with pytest.raises(UsageError, match=r"it asks for (posix|nt)\.mkdir; allowed are NumPy's arrays"):
        load_backbone(path)
    torch.save({"conv1.weight": Code(mark)}, path)
    with pytest.raises(UsageError, match="cannot be read"):
        load_backbone(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "name", ["builtins eval", "builtins getattr", "numpy.lib.npyio load", "numpy load", "functools partial"]
)
def test_no_other_name_is_looked_up(name):
    module, attribute = name.split()
    data = b"\x80\x03c" + f"{module}\n{attribute}\n".encode() + b"."
    with pytest.raises(UsageError, match=f"it asks for {module}.{attribute}"):
        detectron2.load(data, "file")


def test_bytes_that_do_not_fill_an_array_are_refused():
    for array in (detectron2._Array((2, 2), "<f4", b"1234"), detectron2._Array((-1, 2), "<f4", b"1234")):
        with pytest.raises(ValueError, match="reshape"):
            array.tensor()
    for array in (detectron2._Array((1,), "<f4", [1]), detectron2._Array([1], "<f4", b"1234")):
        with pytest.raises(ValueError, match="must have bytes and a shape"):
            array.tensor()


def test_metadata_that_do_not_fit_are_refused(state, tmp_path):
    from safetensors.torch import save_file

    good = {"arch": "resnet18", "width": "2", "stem": "imagenet", "mean": "[0.5]", "std": "[0.5]", "step": "1"}
    for change, words in (
        ({"width": "3"}, r"conv1\.weight \(float32 \(2, 3, 7, 7\) instead of float32 \(3, 3, 7, 7\)"),
        ({"width": "0"}, "width must be at least 1"),
        ({"width": "wide"}, "its metadata cannot be read"),
        ({"mean": '"abc"'}, "its metadata cannot be read"),
        ({"stem": "small"}, r"instead of float32 \(2, 3, 3, 3\)"),
        ({"arch": "resnet34"}, r"it lacks layer1\.2\.conv1\.weight"),
        ({"arch": "vgg"}, "name must be one of resnet18"),
    ):
        save_file(state, tmp_path / "file", metadata=good | change)
        with pytest.raises(UsageError, match=words):
            load_backbone(tmp_path / "file")
    save_file(state, tmp_path / "file", metadata={"arch": "resnet18", "width": "2"})
    with pytest.raises(UsageError, match="its metadata lacks: stem, mean, std, step"):
        load_backbone(tmp_path / "file")


def test_nothing_is_overwritten(small_run, tmp_path, capsys):
    path = tmp_path / "thesis.txt"
    path.write_text("x")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    for taken in (path, link, tmp_path):
        command = ["export", str(small_run[0]), "--format", "safetensors", "--output", str(taken)]
        assert main(command) == 2
        assert f"{taken} exists already and is not overwritten: name another file" in capsys.readouterr().err
    assert path.read_text() == "x" and link.is_symlink() and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_full_disk_leaves_nothing(small_run, tmp_path, capsys, file_format):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        command = ["export", str(small_run[0]), "--format", file_format, "--output", str(tmp_path / "file")]
        assert main(command) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_killed_half_way_there_is_no_file(small_run, tmp_path):
    """Killed when the bytes are written, but not yet on the disk; afterwards the same command succeeds."""
    kill = "import os, sys; from iecl_fast.cli import main; os.fsync = lambda _: os.kill(os.getpid(), 9); main()"
    command = ["export", str(small_run[0]), "--format", "safetensors", "--output", str(tmp_path / "file")]
    done = subprocess.run([sys.executable, "-c", kill, *command], timeout=600)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "file").exists() and [p.name for p in tmp_path.iterdir()] == [".file.tmp"]
    assert main(command) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert load_backbone(tmp_path / "file").feature_dim == 16


def test_without_safetensors_one_sentence_says_what_to_install(small_run, tmp_path, monkeypatch, capsys):
    path = export_checkpoint(small_run[0], "safetensors", tmp_path / "file")[0]
    real = builtins.__import__

    def without(name, *arguments):
        if name.partition(".")[0] == "safetensors":
            raise ModuleNotFoundError("No module named 'safetensors'", name="safetensors")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["export", str(small_run[0]), "--format", "safetensors", "--output", str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pip install safetensors" in error
    with pytest.raises(UsageError, match="pip install safetensors"):
        load_backbone(path)
    assert main(["export", str(small_run[0]), "--format", "torchvision", "--output", str(tmp_path / "other")]) == 0


def test_a_backbone_of_two_networks_is_refused(make_run, tmp_path):
    folder, _ = make_run("cifar10_cmc_ring", "data.name=digits", "method.num_samples=4")
    with pytest.raises(UsageError, match=r"method\.name=cmc has trained LabBackbone, where one ResNet"):
        export_checkpoint(folder, "torchvision", tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "--format", "torchvision"], "required: FILE|DIR"),
        (["export", "."], "required: --format"),
        (["export", ".", "--format", "torchvison"], "did you mean torchvision?"),
        (["export", ".", "--format", "torchvision"], "there is no checkpoint checkpoints/last.ckpt"),
        (["export", "no.ckpt", "--format", "torchvision"], "there is no checkpoint no.ckpt"),
        (["export", ".", "--format", "torchvision", "--ouput", "x"], "did you mean --output?"),
    ],
)
def test_usage_errors(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_errors_of_the_functions(tmp_path):
    with pytest.raises(UsageError, match=r"format: 'onnx' is not allowed, it must be one of torchvision, detectron2"):
        export_checkpoint(tmp_path, "onnx")
    with pytest.raises(UsageError, match="there is no file"):
        load_backbone(tmp_path / "nothing")
    with pytest.raises(UsageError, match="there is no file"):
        load_backbone(tmp_path)
    torch.save({"conv1.weight": build_backbone(width=1).conv1.weight.detach()}, tmp_path / "file")
    with pytest.raises(UsageError, match=r"it lacks bn1\.weight, bn1\.bias, bn1\.running_mean"):
        load_backbone(tmp_path / "file")
