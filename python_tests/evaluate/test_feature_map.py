"""The probe of feature maps: what it sees, that it learns, and that it leaves the backbone alone."""

import json
import subprocess
import sys

import pytest
import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import Dataset

from iecl_fast.cli import main
from iecl_fast.data import ViewsDataset
from iecl_fast.engine import build
from iecl_fast.engine.config import resolve
from iecl_fast.evaluate.feature_map import feature_map_accuracy
from iecl_fast.ssl import build_backbone, build_lab_backbone


class Corners(Dataset):
    """Noise with a bright corner, which is the label: the mean over the image does not tell it."""

    def __init__(self, rows, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(4, (rows,), generator=generator)
        self.images = torch.randn(rows, 3, 8, 8, generator=generator)
        for image, label in zip(self.images, self.labels.tolist(), strict=True):
            image[:, 7 * (label // 2), 7 * (label % 2)] += 6

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], int(self.labels[index])


class Maps(nn.Module):
    """A backbone whose map is a normalised convolution."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def feature_map(self, images):
        return self.norm(self.convolution(images)).relu()


def probe(backbone, transform=lambda image: image, **options):
    views = ViewsDataset(Corners(160, 1), transform, num_views=1, seed=3)
    fabric = Fabric(accelerator="cpu", devices=1)
    defaults = {"num_classes": 4, "epochs": 10, "lr": 0.05, "batch_size": 32}
    return feature_map_accuracy(backbone, views, Corners(80, 2), fabric=fabric, **{**defaults, **options})


def test_places_count_and_the_backbone_is_left_alone():
    torch.manual_seed(0)
    backbone = Maps()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    result = probe(backbone)
    assert result["linear_top1"] > 0.9 and result["linear_top5"] == 1
    assert (result["linear_features"], result["linear_epochs"], result["linear_lr"]) == ("map", 10, 0.05)
    assert all(torch.equal(before[name], value) for name, value in backbone.state_dict().items())
    assert backbone.training and all(p.grad is None for p in backbone.parameters())
    torch.manual_seed(7)
    assert probe(backbone) == result  # whatever the random state


def test_each_epoch_sees_each_image_in_another_view():
    seen = []

    def transform(image):
        seen.append(torch.rand(()).item())
        return image

    probe(Maps(), transform, epochs=3)
    assert len(set(seen)) == len(seen) == 3 * 160


def test_one_step_is_that_of_sgd_from_zero():
    """The first step from zero goes along the mean feature of each class; a rate of 1e-9 leaves the order alone."""
    torch.manual_seed(0)
    backbone = Maps().eval()
    train, test = Corners(160, 1), Corners(80, 2)
    with torch.no_grad():
        features, others = (backbone.feature_map(data.images).flatten(1) for data in (train, test))
        residuals = nn.functional.one_hot(train.labels, 4) - 0.25
        scores = others @ (residuals.T @ features).T + residuals.sum(0)
    expected = (scores.argmax(1) == test.labels).float().mean().item()
    result = probe(backbone, epochs=1, lr=1e-9, batch_size=160)
    assert result["linear_top1"] == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("stem", ["small", "imagenet"])
def test_what_is_pooled_is_the_map(name, stem):
    statistics = {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)}
    images = torch.randn(2, 3, 64, 64)
    for backbone in (build_backbone(name, stem, 4), build_lab_backbone(name, stem, 4, **statistics)):
        backbone.eval()
        with torch.no_grad():
            pooled = backbone.feature_map(images).mean(dim=(2, 3))
            torch.testing.assert_close(pooled, backbone(images))
    assert build_backbone(name, "imagenet", 4).eval().feature_map(torch.randn(1, 3, 224, 224)).shape[2:] == (7, 7)


def test_views_of_the_probe_are_cropped_and_mirrored_only():
    config = resolve({"data": {"name": "digits", "limit": 20}, "evaluate": {"linear_features": "map"}})
    views = build.probe_views(config)
    (view,), label, _ = views[3]
    assert view.shape == (3, 32, 32) and label in range(10) and len(views) == 20
    assert torch.equal(view[0], view[1])  # no colours are drawn
    assert build.probe_views(resolve({"data": {"name": "digits"}})) is None


def test_a_run_on_two_devices_and_an_evaluation(tmp_path, capsys):
    small = ["encoder.width=2", "encoder.stem=imagenet", "method.dim=8", "method.num_keys=32", "data.limit=48"]
    trainer = ["trainer.epochs=1", "trainer.batch_size=8", "trainer.progress=false", "trainer.threads=1"]
    map_probe = ["evaluate.linear_features=map", "evaluate.linear_epochs=2"]
    run = ["pretrain", "--output", str(tmp_path / "run"), *small, *trainer, *map_probe]
    command = [sys.executable, "-m", "iecl_fast.cli", *run, "trainer.devices=2", "trainer.accelerator=cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["linear_features"] == "map" and 0 <= result["linear_top1"] <= 1 and "knn_top1" in result

    assert main(["evaluate", "linear", "--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / "map")]) == 0
    again = json.loads((tmp_path / "map" / "result.json").read_text())
    assert again["linear_top1"] == pytest.approx(result["linear_top1"], abs=0.02)  # sums in another order
    assert "knn_top1" not in again
    pooled = ["evaluate", "linear", "--checkpoint", str(tmp_path / "run"), "evaluate.linear_features=pooled"]
    assert main(pooled) == 0
    assert "linear_l2" in capsys.readouterr().out
