"""The checkpoint's backbone in a larger network: all its weights, its own widths, and still where it has to be."""

import pytest
import torch
import torchvision
from torch import nn

from dense import shapes
from iecl_fast.engine.checkpoint import load_checkpoint
from iecl_fast.engine.errors import RunError, UsageError
from iecl_fast.evaluate.dense.backbone import Stages, Stillness, dilate, measure_stages
from iecl_fast.evaluate.features import frozen
from iecl_fast.evaluate.restore import plain_resnet
from iecl_fast.ssl import build_backbone


@pytest.fixture
def images():
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def test_all_weights_are_the_checkpoint_s(tmp_path):
    method = shapes.make_checkpoint(tmp_path / "c.ckpt")
    backbone, config = plain_resnet(load_checkpoint(tmp_path / "c.ckpt"), "c.ckpt")
    expected = method.backbone.state_dict()
    assert backbone.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in backbone.state_dict().items())
    assert all(parameter.requires_grad for parameter in backbone.parameters())
    assert len(config.views["mean"]) == len(config.views["std"]) == 3


def test_the_data_of_the_run_need_not_be_there(tmp_path):
    shapes.make_checkpoint(tmp_path / "c.ckpt")
    state = load_checkpoint(tmp_path / "c.ckpt")
    state["config"]["data"]["name"] = "/no/such/folder"
    backbone, _ = plain_resnet(state, "c.ckpt")
    assert backbone.feature_dim == 64


def lose(weights, name):
    del weights[name]


def add(weights, name):
    weights[name + "2"] = weights[name]


def reshape(weights, name):
    weights[name] = weights[name][:-1]


@pytest.mark.parametrize("spoil", [lose, add, reshape])
def test_other_weights_are_refused_by_name(tmp_path, spoil):
    shapes.make_checkpoint(tmp_path / "c.ckpt")
    state = load_checkpoint(tmp_path / "c.ckpt")
    name = next(name for name in state["method"] if name.endswith("layer3.1.conv2.weight"))
    spoil(state["method"], name)
    with pytest.raises(UsageError, match=r"c\.ckpt does not fit .*layer3\.1\.conv2\.weight"):
        plain_resnet(state, "c.ckpt")


@pytest.mark.parametrize("method", ["iecl", "moco", "simclr", "byol", "simsiam"])
def test_spectral_weights_come_divided_and_plain(tmp_path, images, method):
    options = {"name": method, "spectral": True}
    if method in ("iecl", "moco"):
        options |= {"dim": 8, "num_keys": 16}
    whole = shapes.make_checkpoint(tmp_path / "c.ckpt", method=options, base="digits")
    backbone, _ = plain_resnet(load_checkpoint(tmp_path / "c.ckpt"), "c.ckpt")
    plain = build_backbone("resnet18", "imagenet", 8)
    assert backbone.state_dict().keys() == plain.state_dict().keys()
    assert all(isinstance(parameter, nn.Parameter) for parameter in backbone.parameters())
    with frozen(whole) as whole, frozen(backbone):
        assert torch.equal(backbone(images), whole.backbone(images))
        original = whole.backbone.conv1.parametrizations.weight.original
        assert not torch.equal(backbone.conv1.weight, original)


def test_two_networks_are_refused(tmp_path):
    shapes.make_checkpoint(tmp_path / "c.ckpt", method={"name": "cmc"}, base="cifar10_cmc_ring")
    with pytest.raises(UsageError, match=r"method\.name=cmc has trained LabBackbone"):
        plain_resnet(load_checkpoint(tmp_path / "c.ckpt"), "c.ckpt")


@pytest.mark.parametrize(
    ("name", "stem", "width", "expected"),
    [
        ("resnet18", "imagenet", 8, [(8, 4), (16, 8), (32, 16), (64, 32)]),
        ("resnet18", "small", 4, [(4, 1), (8, 2), (16, 4), (32, 8)]),
        ("resnet50", "imagenet", 4, [(16, 4), (32, 8), (64, 16), (128, 32)]),
    ],
)
def test_channels_and_strides_are_the_backbone_s(images, name, stem, width, expected):
    backbone = build_backbone(name, stem, width)
    backbone.train()
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    assert measure_stages(backbone) == expected
    assert backbone.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())
    backbone.eval()
    assert torch.equal(Stages(backbone)(images)[-1], backbone.feature_map(images))
    assert [output.shape[1] for output in Stages(backbone, first=2, last=3)(images)] == [
        size for size, _ in expected[1:3]
    ]


@pytest.mark.parametrize(("output_stride", "replaced"), [(32, (0, 0, 0)), (16, (0, 0, 1)), (8, (0, 1, 1))])
def test_dilation_is_torchvision_s(images, output_stride, replaced):
    backbone = build_backbone("resnet50")
    theirs = torchvision.models.resnet50(replace_stride_with_dilation=list(map(bool, replaced)))
    theirs.fc = nn.Identity()
    theirs.load_state_dict(backbone.state_dict())
    dilate(backbone, output_stride)
    with frozen(backbone), frozen(theirs):
        features = backbone.feature_map(images[:1])
        # Summing in other orders aside, these are the same convolutions.
        torch.testing.assert_close(backbone(images[:1]), theirs(images[:1]))
    assert features.shape[-1] == 64 // output_stride


@pytest.mark.parametrize(("stem", "output_stride", "side"), [("imagenet", 8, 8), ("imagenet", 16, 4), ("small", 8, 8)])
def test_dilation_of_small_blocks(images, stem, output_stride, side):
    backbone = build_backbone("resnet18", stem, 4)
    undilated = [module.dilation for module in backbone.modules() if isinstance(module, nn.Conv2d)]
    dilate(backbone, output_stride)
    with frozen(backbone):
        assert backbone.feature_map(images).shape == (2, 32, side, side)
    dilations = [module.dilation for module in backbone.modules() if isinstance(module, nn.Conv2d)]
    assert (dilations == undilated) == (stem == "small")


def train_once(backbone, stillness, images):
    backbone.train()
    stillness.hold()
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1, weight_decay=0.1)
    loss = backbone(images).sum() + torch.zeros((), requires_grad=True)
    loss.backward()
    optimizer.step()


def changed(backbone, before):
    return {name for name, tensor in backbone.state_dict().items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize(
    ("freeze", "batch_norm", "moves"),
    [(True, "train", ()), (True, "frozen", ()), (False, "frozen", ("conv",)), (False, "train", ("conv", "bn"))],
)
def test_what_is_frozen_stays(images, freeze, batch_norm, moves):
    backbone = build_backbone("resnet18", "imagenet", 4)
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    stillness = Stillness(backbone, freeze=freeze, batch_norm=batch_norm)
    train_once(backbone, stillness, images)
    stillness.check()
    names = changed(backbone, before)
    assert {kind for kind in ("conv", "bn") if any(kind in name for name in names)} == set(moves)
    assert any("running_mean" in name for name in names) == ("bn" in moves)


@pytest.mark.parametrize("name", ["layer2.0.conv1.weight", "bn1.running_var", "bn1.num_batches_tracked"])
def test_a_frozen_backbone_that_has_changed_is_named(name):
    backbone = build_backbone("resnet18", "imagenet", 4)
    stillness = Stillness(backbone, freeze=True, batch_norm="train")
    stillness.check()
    backbone.state_dict()[name].add_(1)
    with pytest.raises(RunError, match=f"has changed: {name}$"):
        stillness.check()
