"""The papers' probes: what they see, the steps they take, and that they leave the backbone alone."""

import dataclasses
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
from iecl_fast.engine.errors import RunError, UsageError
from iecl_fast.engine.settings import EvaluateConfig, LinearProtocol
from iecl_fast.evaluate.probe import probe_of_features, probe_of_views
from iecl_fast.evaluate.protocols import measure
from iecl_fast.ssl import build_backbone, build_lab_backbone

PROTOCOL = LinearProtocol("map", True, 10, 32, 0.05, 0.9, 0.0, "step")


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
        self.calls = 0

    def feature_map(self, images):
        return self.norm(self.convolution(images)).relu()

    def forward(self, images):
        self.calls += len(images)
        return self.feature_map(images).mean(dim=(2, 3))


@pytest.fixture
def fabric():
    return Fabric(accelerator="cpu", devices=1)


def probe(backbone, fabric, transform=lambda image: image, **changes):
    views = ViewsDataset(Corners(160, 1), transform, num_views=1, seed=3)
    protocol = dataclasses.replace(PROTOCOL, **changes)
    return probe_of_views(
        backbone, views, Corners(80, 2), num_classes=4, protocol=protocol, fabric=fabric, batch_size=32
    )


def accuracy(scores, labels):
    return (scores.argmax(1) == labels).double().mean().item()


def test_places_count_and_the_backbone_is_left_alone(fabric):
    torch.manual_seed(0)
    backbone = Maps()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    scores, labels = probe(backbone, fabric)
    assert accuracy(scores, labels) > 0.9
    assert accuracy(*probe(backbone, fabric, features="pooled")) < 0.6
    assert all(torch.equal(before[name], value) for name, value in backbone.state_dict().items())
    assert backbone.training and all(p.grad is None for p in backbone.parameters())
    torch.manual_seed(7)
    assert torch.equal(probe(backbone, fabric)[0], scores)  # whatever the random state


def test_each_epoch_sees_each_image_in_another_view(fabric):
    seen = []

    def transform(image):
        seen.append(torch.rand(()).item())
        return image

    probe(Maps(), fabric, transform, epochs=3)
    assert len(set(seen)) == len(seen) == 3 * 160


def test_features_are_computed_once_without_crops_and_in_each_epoch_with_them(fabric):
    backbone, train, test = Maps(), Corners(160, 1), Corners(80, 2)
    for crops, calls in ((False, 160 + 80), (True, 1 + 5 * 160 + 80)):
        backbone.calls = 0
        options = EvaluateConfig(linear="iecl", linear_crops=crops, linear_epochs=5, linear_batch_size=16)
        views = ViewsDataset(train, lambda image: image, num_views=1, seed=3) if crops else None
        result = measure(backbone, train, test, 4, ("linear",), options=options, fabric=fabric, probe_views=views)
        assert backbone.calls == calls
        assert (result["linear_protocol"], result["linear_crops"], result["linear_epochs"]) == ("iecl", crops, 5)


@pytest.mark.parametrize("schedule", ["constant", "step", "cosine"])
def test_the_steps_are_those_of_torchs_sgd(schedule):
    """Whole batches, so that the order does not matter: three epochs of one step each, written out."""
    torch.manual_seed(0)
    train, labels, test = torch.randn(20, 5), torch.arange(20) % 3, torch.randn(7, 5)
    protocol = LinearProtocol("pooled", False, 3, 20, 0.5, 0.9, 0.1, schedule)
    rates = {"constant": [0.5, 0.5, 0.5], "step": [0.5, 0.5, 0.005], "cosine": [0.5, 0.375, 0.125]}[schedule]
    expected = nn.Linear(5, 3)
    nn.init.zeros_(expected.weight)
    nn.init.zeros_(expected.bias)
    optimizer = torch.optim.SGD(expected.parameters(), lr=1.0, momentum=0.9, weight_decay=0.1)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        nn.functional.cross_entropy(expected(train), labels).backward()
        optimizer.step()
    scores = probe_of_features(train, labels, test, num_classes=3, protocol=protocol)
    torch.testing.assert_close(scores, expected(test).detach())


def test_a_training_that_diverges_is_told():
    train = 1e30 * torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    protocol = LinearProtocol("pooled", False, 3, 20, 1e20, 0.9, 0.0, "constant")
    with pytest.raises(RunError, match=r"in epoch \d of 3: try a smaller evaluate\.linear_lr"):
        probe_of_features(train, torch.arange(20) % 3, train, num_classes=3, protocol=protocol)


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


def test_the_papers_settings():
    iecl, ring = (EvaluateConfig(linear=name).linear_protocol() for name in ("iecl", "ring"))
    assert (iecl.features, iecl.crops, iecl.epochs, iecl.batch_size) == ("pooled", True, 200, 512)
    assert (iecl.lr, iecl.momentum, iecl.weight_decay) == (0.03, 0.9, 1e-5)
    assert (ring.features, ring.crops, ring.epochs, ring.lr) == ("map", True, 100, 0.01)
    other = EvaluateConfig(linear="iecl", linear_lr=0.1, linear_crops=False).linear_protocol()
    assert other == dataclasses.replace(iecl, lr=0.1, crops=False)
    assert EvaluateConfig().linear_protocol() is None


def test_views_of_the_probe_are_cropped_and_mirrored_only():
    def views(**evaluate):
        return build.probe_views(resolve({"data": {"name": "digits", "limit": 20}, "evaluate": evaluate}))

    cropped = views(linear="ring")
    (view,), label, _ = cropped[3]
    assert view.shape == (3, 32, 32) and label in range(10) and len(cropped) == 20
    assert torch.equal(view[0], view[1])  # no colours are drawn
    plain = views(linear="ring", linear_crops=False)
    (first,), _, _ = plain[3]
    plain.set_epoch(1)
    assert torch.equal(first, plain[3][0][0]) and not torch.equal(first, view)
    assert views() is None
    assert views(linear="iecl", linear_crops=False) is None


def test_values_of_sgd_are_refused_for_lbfgs():
    with pytest.raises(UsageError, match=r"evaluate\.linear_lr: 0\.1 is not allowed with evaluate\.linear=lbfgs.*iecl"):
        resolve({"evaluate": {"linear_lr": 0.1}})


def test_a_run_on_two_devices_and_an_evaluation(tmp_path, capsys):
    small = ["encoder.width=2", "encoder.stem=imagenet", "method.dim=8", "method.num_keys=32", "data.limit=48"]
    trainer = ["trainer.epochs=1", "trainer.batch_size=8", "trainer.progress=false", "trainer.threads=1"]
    map_probe = ["evaluate.linear=ring", "evaluate.linear_epochs=2"]
    run = ["pretrain", "--output", str(tmp_path / "run"), *small, *trainer, *map_probe]
    command = [sys.executable, "-m", "iecl_fast.cli", *run, "trainer.devices=2", "trainer.accelerator=cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["linear_features"] == "map" and 0 <= result["linear_top1"] <= 1 and "knn_top1" in result

    evaluate = ["evaluate", "linear", "--checkpoint", str(tmp_path / "run")]
    assert main([*evaluate, "--output", str(tmp_path / "map")]) == 0
    again = json.loads((tmp_path / "map" / "result.json").read_text())
    assert again["linear_top1"] == pytest.approx(result["linear_top1"], abs=0.02)  # sums in another order
    assert "knn_top1" not in again
    # Another protocol comes with its own values, not with the run's two epochs.
    assert main([*evaluate, "evaluate.linear=lbfgs"]) == 0
    assert "linear_l2" in capsys.readouterr().out
    assert (
        main([*evaluate, "evaluate.linear=iecl", "evaluate.linear_crops=false", "--output", str(tmp_path / "c")]) == 0
    )
    assert json.loads((tmp_path / "c" / "result.json").read_text())["linear_epochs"] == 200
