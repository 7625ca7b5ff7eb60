"""What is exported comes back bit for bit, and other libraries find what they expect."""

import json
import pickle

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn

from iecl_fast.cli import main
from iecl_fast.evaluate import detectron2
from iecl_fast.evaluate.export import FORMATS, export_checkpoint, load_backbone, load_strictly, read_backbone

CASES = {
    "resnet18": ("digits_moco", "encoder.width=3"),
    "resnet18, small stem": ("digits_moco", "encoder.stem=small"),
    "resnet50": ("digits_moco", "encoder.name=resnet50"),
    "resnet18, spectral": ("digits", "method.spectral=true", "method.hidden_dim=16"),
    "resnet50, small stem, spectral": (
        "digits_moco",
        "method.spectral=true",
        "encoder.name=resnet50",
        "encoder.stem=small",
    ),
    "byol, spectral": ("cifar10_byol", "method.spectral=true", "data.name=digits", "method.hidden_dim=16"),
    "memory bank": ("cifar10_ir_ring", "data.name=digits", "method.num_samples=4"),
}


@pytest.fixture(scope="module", params=CASES)
def run(request, make_run):
    return make_run(*CASES[request.param])


@pytest.mark.parametrize("file_format", FORMATS)
def test_the_same_outputs_bit_for_bit(run, tmp_path, file_format):
    folder, original = run
    path, _ = export_checkpoint(folder, file_format, tmp_path / "file")
    loaded = load_backbone(path)
    assert not loaded.training
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(images), original(images))
    assert not any("parametrizations" in name for name in loaded.state_dict())


@pytest.mark.parametrize("file_format", FORMATS)
def test_every_tensor_comes_back(small_run, tmp_path, file_format):
    folder, original = small_run
    path, exported = export_checkpoint(folder, file_format, tmp_path / "file")
    content, loaded, expected = read_backbone(path), load_backbone(path).state_dict(), original.state_dict()
    assert loaded.keys() == exported.state.keys() == expected.keys() and len(content.state) == len(expected)
    for name, tensor in expected.items():
        for other in (loaded[name], content.state[content.name_in_file(name)]):
            assert other.dtype == tensor.dtype and torch.equal(other, tensor), name
    assert (content.name, content.stem, content.width) == ("resnet18", "imagenet", 2)


def test_torchvision_takes_it_but_for_the_classifier(make_run, tmp_path):
    folder, original = make_run("digits_moco", "encoder.width=64")
    path, _ = export_checkpoint(folder, "torchvision", tmp_path / "file.pth")
    state = torch.load(path, weights_only=True)
    theirs = torchvision.models.resnet18()
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "fc.weight", "fc.bias". $'):
        theirs.load_state_dict(state)
    load_strictly(theirs, state, path, allow_missing=("fc.weight", "fc.bias"))
    theirs.fc = nn.Identity()
    theirs.load_state_dict(state, strict=True)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(theirs.eval()(images), original(images))


def test_weights_of_torchvision_are_read_when_their_classifier_is_given_up(tmp_path):
    theirs = torchvision.models.resnet18().eval()
    torch.save(theirs.state_dict(), tmp_path / "file.pth")
    loaded = load_backbone(tmp_path / "file.pth", allow_unexpected=("fc.weight", "fc.bias"))
    images = torch.randn(2, 3, 64, 64)
    theirs.fc = nn.Identity()
    with torch.no_grad():
        assert torch.equal(loaded(images), theirs(images))


def test_the_pickle_is_as_detectron2_reads_it(make_run, tmp_path):
    folder, original = make_run("digits_moco", "encoder.name=resnet50")
    path, _ = export_checkpoint(folder, "detectron2", tmp_path / "file.pkl")
    content = pickle.loads(path.read_bytes(), encoding="latin1")
    assert content.keys() == {"model", "__author__", "matching_heuristics"}
    assert content["matching_heuristics"] is True and content["__author__"] == "iecl_fast"
    model = content["model"]
    assert all(type(array) is np.ndarray and array.flags.writeable for array in model.values())
    state = original.state_dict()
    for theirs, ours in {  # as they stand in Detectron2's own conversion of torchvision's files
        "stem.conv1.weight": "conv1.weight",
        "stem.conv1.norm.running_var": "bn1.running_var",
        "res2.0.conv1.weight": "layer1.0.conv1.weight",
        "res2.0.shortcut.weight": "layer1.0.downsample.0.weight",
        "res2.0.shortcut.norm.bias": "layer1.0.downsample.1.bias",
        "res4.5.conv3.norm.weight": "layer3.5.bn3.weight",
        "res5.2.conv2.norm.num_batches_tracked": "layer4.2.bn2.num_batches_tracked",
    }.items():
        assert np.array_equal(model[theirs], state[ours].numpy())
        assert model[theirs].dtype == state[ours].numpy().dtype
    assert len(model) == len(state)
    assert not any("layer" in name or "bn" in name or "downsample" in name for name in model)


def test_old_and_new_numpy_read_the_pickle(small_run, tmp_path):
    path, _ = export_checkpoint(small_run[0], "detectron2", tmp_path / "file.pkl")
    asked = set()

    class Noting(pickle.Unpickler):
        def find_class(self, module, name):
            asked.add((module, name))
            return super().find_class(module, name)

    with open(path, "rb") as file:
        Noting(file).load()
    assert asked == {("numpy", "ndarray")}  # not numpy.core or numpy._core, of which a version has one


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_pickles_as_numpy_writes_them_are_read(small_run, protocol):
    state = small_run[1].state_dict()
    arrays = {detectron2.detectron2_name(name): tensor.numpy() for name, tensor in state.items()}
    arrays["stem.conv1.weight"] = np.asfortranarray(arrays["stem.conv1.weight"])
    arrays["stem.conv1.norm.bias"] = arrays["stem.conv1.norm.bias"].astype(">f4")
    data = pickle.dumps({"model": arrays, "__author__": "torchvision"}, protocol=protocol)
    loaded = detectron2.load(data, "file.pkl")
    assert len(loaded) == len(state)
    for name, tensor in state.items():
        other = loaded[detectron2.detectron2_name(name)]
        assert other.dtype == tensor.dtype and torch.equal(other, tensor)


def test_safetensors_says_what_it_is_of(small_run, tmp_path):
    from safetensors import safe_open

    path, _ = export_checkpoint(small_run[0], "safetensors", tmp_path / "file")
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    digits = [0.3092] * 3
    expected = {"format": "pt", "arch": "resnet18", "width": "2", "stem": "imagenet", "step": "7"}
    assert {key: metadata[key] for key in expected} == expected
    assert json.loads(metadata["mean"]) == digits and metadata.keys() == {*expected, "mean", "std"}
    content = read_backbone(path)
    assert content.mean == tuple(digits) and content.std == (0.3487,) * 3 and content.step == 7


def test_safetensors_of_another_library_are_read(small_run, tmp_path):
    from safetensors.torch import save_file

    save_file(small_run[1].state_dict(), tmp_path / "file")
    content = read_backbone(tmp_path / "file")
    assert (content.name, content.width, content.mean) == ("resnet18", 2, None)
    assert load_backbone(tmp_path / "file").feature_dim == 16


@pytest.mark.parametrize(("file_format", "name"), FORMATS.items())
@pytest.mark.parametrize("place", ["", "checkpoints/last.ckpt"])
def test_the_command(make_run, capsys, file_format, name, place):
    folder, original = make_run()
    assert main(["export", str(folder / place), "--format", file_format]) == 0
    path = (folder / place).parent / name if place else folder / name
    printed = capsys.readouterr().out
    assert f"resnet18, width 2, imagenet stem, after 7 steps: {path}" in printed
    assert ("own resnet18 has width 64" in printed) == (file_format != "safetensors")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(load_backbone(path)(images), original(images))


def test_what_detectron2_has_to_be_told(make_run, tmp_path, capsys):
    folder, _ = make_run("digits_moco", "encoder.width=64")
    assert main(["export", str(folder), "--format", "detectron2", "--output", str(tmp_path / "a" / "b.pkl")]) == 0
    printed = capsys.readouterr().out
    assert "DEPTH 18, RES2_OUT_CHANNELS 64, STRIDE_IN_1X1 False" in printed
    assert "MODEL.PIXEL_MEAN: [78.846, 78.846, 78.846]" in printed and "INPUT.FORMAT: RGB" in printed


def test_the_data_of_the_run_need_not_be_there(make_run, tmp_path):
    images = tmp_path / "photos"
    for part in ("train", "test"):
        (images / part / "one").mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(images / part / "one" / "0.png")
    folder, _ = make_run("digits_moco", f"data.name={images}")
    for path in sorted(images.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    images.rmdir()
    path, exported = export_checkpoint(folder, "safetensors")
    assert load_backbone(path).feature_dim == 16
    assert exported.mean == read_backbone(path).mean != (0.3092,) * 3
