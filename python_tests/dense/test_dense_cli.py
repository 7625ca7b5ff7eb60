"""``iecl-fast evaluate detect|segment`` from end to end, and what it refuses."""

import csv
import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dense import shapes
from iecl_fast.cli import main
from iecl_fast.engine.errors import RunError
from iecl_fast.evaluate.dense import from_checkpoint
from iecl_fast.evaluate.dense.settings import resolve_settings

TINY = ["epochs=1", "batch_size=4", "threads=1", "progress=false", "log_steps=1"]
TINY_RCNN = [*TINY, "fpn_channels=16", "head_units=32", "rois_per_image=16", "min_size=[64]"]
NAMES = "classes=[disc,square]"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A run folder with a checkpoint of an untrained encoder under spectral normalisation."""
    folder = tmp_path_factory.mktemp("dense_cli") / "run"
    (folder / "checkpoints").mkdir(parents=True)
    method = {"name": "moco", "num_keys": 16, "spectral": True}
    shapes.make_checkpoint(folder / "checkpoints" / "last.ckpt", method=method, base="digits")
    return folder


def evaluate(task, checkpoint, data, *words):
    return main(["evaluate", task, "--checkpoint", str(checkpoint), "--data", str(data), *words])


@pytest.mark.parametrize(
    ("layout", "words", "figures"),
    [
        ("voc", [NAMES, "features=c4"], ["box"]),
        ("coco", [], ["box", "mask"]),
        ("coco", ["model=keypoint_rcnn", "--freeze"], ["box", "keypoint"]),
    ],
)
def test_detection(checkpoint, voc_folder, coco_folder, tmp_path, capsys, layout, words, figures):
    output = tmp_path / "out"
    data = voc_folder if layout == "voc" else coco_folder
    assert evaluate("detect", checkpoint, data, "--output", str(output), *TINY_RCNN, *words) == 0
    result = json.loads((output / "result.json").read_text())
    assert [kind for kind in ("box", "mask", "keypoint") if f"{kind}_map" in result] == figures
    for kind in figures:
        assert 0 <= result[f"{kind}_map"] <= result[f"{kind}_map50"] <= 1
    assert set(result["box_map_per_class"]) == {"disc", "square"}
    assert (result["step"], result["steps"]) == (7, 3)
    assert (result["train_images"], result["test_images"]) == (12, 6)
    assert result["freeze"] == ("--freeze" in words)
    assert result["settings"]["classes"] == ["disc", "square"]
    assert result["settings"]["test"] == ["test" if layout == "voc" else "val"]
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].split() == ["AP", "AP50", "AP75"]
    assert [line.split()[0] for line in lines[1 : 1 + len(figures)]] == figures
    assert str(output) in out
    with open(output / "metrics.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 3
    for name in ("predictions.png", "curves.png"):
        assert np.asarray(Image.open(output / name)).std() > 10


def test_segmentation(checkpoint, voc_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert evaluate("segment", checkpoint, voc_folder, *TINY, NAMES, "crop_size=48") == 0
    (output,) = (tmp_path / "runs").iterdir()
    assert output.name.startswith("segment-voc-")
    result = json.loads((output / "result.json").read_text())
    values = result["iou_per_class"]
    assert set(values) == {"background", "disc", "square"}
    assert result["miou"] == pytest.approx(sum(values.values()) / 3)
    assert result["model"] == "deeplabv3"
    assert "mean IoU" in capsys.readouterr().out
    assert np.asarray(Image.open(output / "predictions.png")).std() > 10


@pytest.mark.parametrize(
    ("task", "layout", "words", "message"),
    [
        ("detect", "voc", ["epoch=3"], "there is no key epoch of evaluate detect; did you mean epochs?"),
        ("segment", "voc", ["model=mask_rcnn"], "there is no key model of evaluate segment"),
        ("detect", "voc", ["trainer.epochs=3"], "there is no key trainer of evaluate detect"),
        ("detect", "voc", ["epochs=0"], "epochs: 0 is not allowed, it must be at least 1"),
        ("detect", "voc", ["lr=0"], "lr: 0 is not allowed, it must be above 0"),
        (
            "detect",
            "voc",
            ["epochs=2", "warmup_epochs=2"],
            "warmup_epochs: 2.0 is not allowed, it must be below epochs=2",
        ),
        ("detect", "voc", ["model=mask_rcnn"], "model: mask_rcnn is not allowed, a VOC folder has boxes alone"),
        ("detect", "voc", ["model=mask"], "model: 'mask' is not allowed, it must be one of faster_rcnn, mask_rcnn"),
        ("detect", "coco", ["model=keypoint_rcnn", "features=c4"], "features: c4 is not allowed with keypoint_rcnn"),
        ("detect", "coco", [NAMES], "classes: not allowed for a COCO folder"),
        ("detect", "voc", ["classes=[disc,disc]"], "no name may come twice"),
        ("detect", "voc", ["classes=[]"], "classes: [] is not allowed"),
        ("detect", "voc", ["min_size=[]"], "min_size: [] is not allowed"),
        ("detect", "voc", ["min_size=[900]", "max_size=800"], "none may be above max_size=800"),
        ("detect", "voc", ["train=[nowhere]"], "there is no list"),
        ("detect", "voc", [], "object 1/name: 'square' is not allowed, it must be one of aeroplane"),
        ("segment", "voc", ["batch_size=1"], "batch_size: 1 is not allowed"),
        ("segment", "voc", ["scale=[2,1]"], "scale: [2.0, 1.0] is not allowed"),
        ("segment", "voc", ["output_stride=4"], "output_stride: 4 is not allowed, it must be one of 8, 16, 32"),
        ("segment", "coco", [], "has no ImageSets (VOC)"),
        ("detect", "empty", [], "has neither ImageSets (VOC) nor annotations/*.json (COCO)"),
        ("detect", "missing", [], "--data: there is no folder"),
    ],
)
def test_usage_errors(checkpoint, voc_folder, coco_folder, tmp_path, monkeypatch, capsys, task, layout, words, message):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    folder = {"voc": voc_folder, "coco": coco_folder}.get(layout, tmp_path / layout)
    assert evaluate(task, checkpoint, folder, *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "runs").exists()


def test_other_weights_are_refused(tmp_path, voc_folder, capsys):
    shapes.make_checkpoint(tmp_path / "c.ckpt")
    state = torch.load(tmp_path / "c.ckpt", weights_only=True)
    name = next(name for name in state["method"] if name.endswith("layer1.0.bn1.running_mean"))
    state["method"]["odd.weight"] = state["method"].pop(name)
    torch.save(state, tmp_path / "c.ckpt")
    assert evaluate("detect", tmp_path / "c.ckpt", voc_folder, NAMES) == 2
    error = capsys.readouterr().err
    assert "layer1.0.bn1.running_mean" in error
    assert "odd.weight" in error


COMMANDS = [
    line
    for document in (Path(__file__).parents[2] / "docs").glob("*.md")
    for block in re.findall(r"```bash\n(.*?)```", document.read_text(), flags=re.DOTALL)
    for line in block.splitlines()
    if re.match("iecl-fast evaluate +(detect|segment) ", line)
]


def test_there_are_documented_commands():
    assert len(COMMANDS) > 5


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands_are_understood(command, monkeypatch, capsys):
    def begin(task, checkpoint, data, *, freeze, output, overrides):
        settings = resolve_settings(task, "coco" if data == "coco" else "voc", overrides)
        raise RunError(f"{task} {checkpoint} {data} {freeze} {len(settings.drops)}")

    monkeypatch.setattr(from_checkpoint, "evaluate_dense", begin)
    words = shlex.split(command, comments=True)
    assert main(words[1:]) == 1
    seen = capsys.readouterr().err.split()
    assert seen[1:4] == [words[2], "runs/NAME", words[words.index("--data") + 1]]
    assert seen[4] == str("--freeze" in words)


def test_a_folder_that_is_there_is_not_overwritten(checkpoint, voc_folder, tmp_path, capsys):
    (tmp_path / "result.json").write_text("{}")
    assert evaluate("detect", checkpoint, voc_folder, NAMES, "--output", str(tmp_path)) == 2
    assert "not overwritten" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_broken_image_is_a_message(checkpoint, voc_folder, tmp_path, capsys):
    copy = shutil.copytree(voc_folder, tmp_path / "voc")
    image = copy / "JPEGImages" / "000003.jpg"
    image.write_bytes(image.read_bytes()[:-600])
    assert evaluate("detect", checkpoint, copy, *TINY_RCNN, NAMES, "--output", str(tmp_path / "out")) == 1
    error = capsys.readouterr().err
    assert "an image cannot be read" in error
    assert "000003.jpg" in error
    assert "Traceback" not in error


def spoil(folder, change):
    """Change the test images of boxes and of masks."""
    for name in (folder / "ImageSets" / "Main" / "test.txt").read_text().split():
        for file in (folder / "Annotations" / f"{name}.xml", folder / "SegmentationClass" / f"{name}.png"):
            change(file)


@pytest.mark.parametrize(
    ("task", "words"), [("detect", "has an object that is neither"), ("segment", "has a pixel with a class")]
)
def test_nothing_to_be_found_is_said_before_the_training(checkpoint, voc_folder, tmp_path, capsys, task, words):
    def empty(file):
        if file.suffix == ".xml":
            file.write_text(re.sub("<difficult>0", "<difficult>1", file.read_text()))
        else:
            Image.new("L", Image.open(file).size, 255).save(file)

    copy = shutil.copytree(voc_folder, tmp_path / "voc")
    spoil(copy, empty)
    assert evaluate(task, checkpoint, copy, NAMES, "--output", str(tmp_path / "out")) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("task", ["detect", "segment"])
def test_a_broken_test_image_is_said_before_the_training(checkpoint, voc_folder, tmp_path, capsys, task):
    copy = shutil.copytree(voc_folder, tmp_path / "voc")
    image = copy / "JPEGImages" / "000014.jpg"
    image.write_bytes(image.read_bytes()[:-600])
    assert evaluate(task, checkpoint, copy, NAMES, "--output", str(tmp_path / "out")) == 2
    assert "000014.jpg: image file is truncated" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_last_step_that_diverges_is_a_message(checkpoint, voc_folder, tmp_path, capsys):
    words = [*TINY_RCNN, NAMES, "lr=1e30", "weight_decay=1e30", "batch_size=12", "epochs=1", "warmup_epochs=0"]
    assert evaluate("detect", checkpoint, voc_folder, *words, "--output", str(tmp_path / "out")) == 1
    assert "a weight is no finite number after step 1 of 1" in capsys.readouterr().err


def test_a_training_that_diverges_is_a_message(checkpoint, voc_folder, tmp_path, capsys):
    words = [*TINY_RCNN, NAMES, "lr=1e30", "epochs=2", "warmup_epochs=0"]
    assert evaluate("detect", checkpoint, voc_folder, *words, "--output", str(tmp_path / "out")) == 1
    error = capsys.readouterr().err
    assert "the loss is no number at step 2 of 6" in error
    assert "Traceback" not in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(checkpoint, voc_folder, capsys):
    assert evaluate("segment", checkpoint, voc_folder, NAMES, "accelerator=cuda") == 2
    assert "iecl-fast: accelerator, precision: " in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_on_a_gpu(checkpoint, voc_folder, coco_folder, tmp_path, precision):
    device = ["accelerator=cuda", f"precision={precision}"]
    words = [*TINY_RCNN, *device, "model=keypoint_rcnn", "--freeze", "--output", str(tmp_path / "keypoints")]
    assert evaluate("detect", checkpoint, coco_folder, *words) == 0
    words = [*TINY_RCNN, *device, "features=c4", "--output", str(tmp_path / "masks")]
    assert evaluate("detect", checkpoint, coco_folder, *words) == 0
    words = [*TINY, *device, NAMES, "crop_size=48", "--output", str(tmp_path / "segmentation")]
    assert evaluate("segment", checkpoint, voc_folder, *words) == 0
    for name in ("keypoints", "masks", "segmentation"):
        assert (tmp_path / name / "predictions.png").is_file()


def test_needs_the_extra(checkpoint, voc_folder, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pycocotools" else found(name))
    assert evaluate("segment", checkpoint, voc_folder) == 1
    error = capsys.readouterr().err
    assert error == "iecl-fast: evaluate segment needs pycocotools: pip install 'iecl_fast[eval]' has it\n"


def test_data_is_needed_and_freeze_belongs_here(checkpoint, capsys):
    assert main(["evaluate", "detect", "--checkpoint", str(checkpoint)]) == 2
    assert "needs --data FOLDER once" in capsys.readouterr().err
    assert main(["evaluate", "knn", "--checkpoint", str(checkpoint), "--freeze"]) == 2
    assert "--freeze belongs to detect and segment" in capsys.readouterr().err


def test_help_lists_the_keys(capsys):
    assert main(["evaluate", "detect", "--help"]) == 0
    text = capsys.readouterr().out
    for words in ("batch_norm=train", "features=fpn", "output_stride=16", "min_size=[480,512", "--freeze"):
        assert words in text
