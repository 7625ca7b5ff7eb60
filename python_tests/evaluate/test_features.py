"""Features are those of the frozen backbone, and the backbone is left as it was."""

from types import SimpleNamespace

import pytest
import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import Dataset

from iecl_fast.engine.errors import RunError
from iecl_fast.engine.faults import Faults
from iecl_fast.engine.settings import EvaluateConfig
from iecl_fast.evaluate import features as module
from iecl_fast.evaluate.features import extract_features, frozen, unchanged
from iecl_fast.evaluate.protocols import measure


class Images(Dataset):
    """Random images; those in `broken` cannot be read."""

    def __init__(self, rows=11, broken=()):
        self.images = torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        self.broken = broken

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError(f"image file {index} is truncated")
        return self.images[index], index % 3


@pytest.fixture
def backbone():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Dropout(0.5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


@pytest.fixture
def fabric():
    return Fabric(accelerator="cpu", devices=1)


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_features_in_order_and_the_backbone_untouched(backbone, fabric, batch_size):
    data = Images()
    backbone[1].eval()  # someone has frozen its statistics
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    modes = [module.training for module in backbone.modules()]
    random_state = torch.get_rng_state()

    features, labels = extract_features(backbone, data, fabric=fabric, batch_size=batch_size)

    with frozen(backbone):
        expected = backbone(data.images)
    torch.testing.assert_close(features, expected)
    assert features.dtype == torch.float32
    assert not features.requires_grad
    assert labels.tolist() == [index % 3 for index in range(11)]
    assert [module.training for module in backbone.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_mode_comes_back_after_an_error(backbone):
    with pytest.raises(ZeroDivisionError), frozen(backbone):
        assert not backbone.training
        raise ZeroDivisionError
    assert backbone.training


def test_ranks_put_their_parts_together(backbone, fabric, monkeypatch):
    data = Images(rows=7)
    whole, labels = extract_features(backbone, data, fabric=fabric, batch_size=3)
    first = {torch.float32: whole[:4], torch.int64: labels[:4], torch.bool: torch.ones(4, dtype=torch.bool)}
    second = SimpleNamespace(global_rank=1, world_size=2, device=torch.device("cpu"))
    monkeypatch.setattr(module, "gather_rows", lambda rows: torch.cat([first[rows.dtype], rows]))
    features, targets = extract_features(backbone, data, fabric=second, batch_size=3, faults=Faults(fabric))
    torch.testing.assert_close(features, whole)
    assert torch.equal(targets, labels)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_one_line(backbone, fabric, workers):
    with pytest.raises(RunError) as caught:
        extract_features(backbone, Images(broken=[5]), fabric=fabric, batch_size=4, workers=workers)
    message = str(caught.value)
    assert "image file 5 is truncated" in message
    assert "\n" not in message


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_images_are_left_out_as_far_as_is_allowed(backbone, fabric, workers):
    whole, labels = extract_features(backbone, Images(rows=9), fabric=fabric, batch_size=4)
    faults = Faults(fabric, max_unreadable=2)
    loading = {"fabric": fabric, "batch_size": 4, "workers": workers, "faults": faults}
    features, targets = extract_features(backbone, Images(rows=9, broken=[5, 0]), **loading)
    kept = [1, 2, 3, 4, 6, 7, 8]
    torch.testing.assert_close(features, whole[kept])
    assert torch.equal(targets, labels[kept])
    assert len(faults.unreadable) == 2
    with pytest.raises(RunError, match=r"3 images cannot be read, data.max_unreadable=2"):
        extract_features(backbone, Images(rows=9, broken=[3]), **loading)


def test_measure_takes_only_the_protocols_asked_for(backbone, fabric):
    data = Images(rows=30)
    options = EvaluateConfig(linear_iterations=5)
    knn = measure(backbone, data, data, 3, ("knn",), options=options, fabric=fabric)
    both = measure(backbone, data, data, 3, ("knn", "linear"), options=options, fabric=fabric)
    assert knn.keys() == {"knn_top1", "knn_top5", "knn_k", "knn_temperature"}
    assert knn.items() <= both.items()
    assert (knn["knn_k"], knn["knn_temperature"]) == (30, 0.07)  # k is clipped to the images
    assert (both["linear_protocol"], both["linear_iterations"]) == ("lbfgs", 5)
    assert 1 / 3 < both["linear_top1"] <= 1


def test_an_encoder_that_does_not_stay_as_it_was_is_an_error(backbone, fabric):
    """Batch norm that learns in evaluation mode, as a part that counts its calls would."""

    def learn(module, inputs, output):
        module.running_mean += 1.0

    data = Images(rows=30)
    backbone[1].register_forward_hook(learn)
    with pytest.raises(RunError, match=r"stay frozen.*have changed: 1\.running_mean$"):
        measure(backbone, data, data, 3, ("knn",), options=EvaluateConfig(), fabric=fabric)


def test_changes_of_every_kind_are_seen(backbone):
    def weight():
        backbone[0].weight.data[0, 0, 0, 0] += 1e-6

    def count():
        backbone[1].num_batches_tracked += 1

    def fresh():
        backbone[1].register_buffer("fresh", torch.zeros(1))

    for change, words in ((weight, "0.weight"), (count, "1.num_batches_tracked"), (fresh, "new ones")):
        with pytest.raises(RunError, match=words), unchanged(backbone):
            change()
    backbone[0].weight.data[0] = float("nan")
    with unchanged(backbone):
        pass  # NaN is no change
