"""Fine-tuning trains both parts, each at its own rate; label fractions are balanced and always the same."""

import dataclasses
import json

import pytest
import torch
from lightning_fabric import Fabric
from torch import nn

from iecl_fast.cli import main
from iecl_fast.data import ViewsDataset
from iecl_fast.engine import build
from iecl_fast.engine.config import resolve
from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.settings import EvaluateConfig
from iecl_fast.evaluate.finetune import finetune

OPTIONS = EvaluateConfig(finetune_epochs=2, finetune_batch_size=20)


class Backbone(nn.Sequential):
    feature_dim = 72

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(
            nn.Conv2d(3, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten()
        )


def tune(backbone, precision="32-true", limit=200, **changes):
    config = resolve({"data": {"name": "digits", "limit": limit}})
    train, test, classes = build.evaluation_data(config)
    views = ViewsDataset(train, lambda image: image, num_views=1, seed=0)
    test = torch.utils.data.Subset(test, range(100))
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    options = dataclasses.replace(OPTIONS, **changes)
    return finetune(backbone, views, test, num_classes=classes, options=options, fabric=fabric)


def test_both_parts_learn_and_more_steps_learn_more():
    accuracies = []
    for epochs in (1, 8):
        backbone = Backbone()
        before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
        scores, labels = tune(backbone, finetune_epochs=epochs, finetune_lr=0.1)
        assert scores.shape == (100, 10)
        assert all(not torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())
        accuracies.append((scores.argmax(1) == labels).double().mean().item())
    assert accuracies[1] > max(0.6, accuracies[0] + 0.1), accuracies  # a tenth by chance
    tune(frozen := Backbone(), finetune_lr=1e-30)
    for name, weight in frozen.named_parameters():
        torch.testing.assert_close(weight, before[name], atol=1e-20, rtol=0)


def test_the_first_step_has_each_parts_own_rate():
    """One batch, from a classifier of zeros: by hand the classifier moves and the backbone gets no gradient yet."""
    backbone = Backbone()
    before = backbone[0].weight.detach().clone()
    options = {"finetune_batch_size": 50, "finetune_epochs": 1, "finetune_weight_decay": 0.5, "finetune_lr": 0.02}
    tune(backbone, limit=50, **options)
    torch.testing.assert_close(backbone[0].weight, before * (1 - 0.02 * 0.5))  # only the decay, at the backbone's rate


def test_same_seed_same_bits_whatever_the_random_state():
    results = []
    for seed in (1, 2):
        backbone = Backbone()
        torch.manual_seed(seed)
        results.append(tune(backbone)[0])
    assert torch.equal(*results)


def test_half_precision_runs_and_keeps_float32_weights():
    backbone = Backbone()
    scores, _ = tune(backbone, precision="bf16-mixed")
    assert torch.isfinite(scores).all() and backbone[0].weight.dtype == torch.float32


def test_one_image_is_too_few():
    with pytest.raises(UsageError, match="at least 2 labelled training images, there is 1"):
        tune(Backbone(), limit=1)


def test_finetune_from_a_checkpoint_with_a_part_of_the_labels(checkpoint, tmp_path, capsys):
    arguments = ["--checkpoint", str(checkpoint), "data.limit=300", "evaluate.labels=0.1", "evaluate.finetune_epochs=2"]
    assert main(["evaluate", "finetune", *arguments, "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["labels"], result["train_images"], result["test_images"]) == (0.1, 30, 500)
    assert (result["finetune_epochs"], result["finetune_schedule"]) == (2, "cosine")
    assert sum(map(sum, result["finetune_confusion"])) == 500
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
    assert "finetune_top1" in capsys.readouterr().out


def labelled(fraction, seed=0, limit=None):
    config = resolve({"data": {"name": "digits", "limit": limit}, "evaluate": {"labels": fraction}, "seed": seed})
    return build.evaluation_data(config)[0], build.labelled_views(config)


@pytest.mark.parametrize(("fraction", "chosen"), [(0.1, 130), (0.01, 13), (0.001, 10)])
def test_label_fractions_are_balanced(fraction, chosen):
    images, views = labelled(fraction)
    counts = torch.bincount(images.labels, minlength=10)
    assert len(images) == len(views) == chosen
    assert counts.max() - counts.min() <= 1 and counts.min() >= 1
    assert views.dataset.labels.tolist() == images.labels.tolist()
    assert [label for _, label in images] == images.labels.tolist()


def test_label_fractions_depend_on_the_seed_alone():
    rows = [labelled(0.05, seed)[0].rows.tolist() for seed in (3, 3, 4)]
    assert rows[0] == rows[1] != rows[2]
    assert set(labelled(0.01, 3)[0].rows.tolist()) < set(rows[0])
    assert len(labelled(0.5, limit=100)[0]) == 50 and len(labelled(1.0)[0]) == 1297
