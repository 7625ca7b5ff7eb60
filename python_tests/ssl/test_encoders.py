import pytest
import torch
import torchvision
from torch import nn

from iecl_fast.ssl import Encoder, ProjectionHead, build_backbone, normalize_rows


@pytest.mark.parametrize(
    ("name", "stem", "width", "features"),
    [("resnet18", "small", 8, 64), ("resnet34", "imagenet", 4, 32), ("resnet50", "small", 4, 128)],
)
def test_backbone_shape(name, stem, width, features):
    backbone = build_backbone(name, stem, width)
    assert backbone.feature_dim == features
    out = backbone(torch.randn(2, 3, 32, 32))
    assert out.shape == (2, features) and out.isfinite().all()


def test_full_width_is_torchvisions_without_the_classifier():
    theirs = torchvision.models.resnet18()
    ours = build_backbone("resnet18", "imagenet", 64)
    state = {key: value for key, value in theirs.state_dict().items() if not key.startswith("fc.")}
    ours.load_state_dict(state)
    theirs.fc = nn.Identity()
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(ours.eval()(images), theirs.eval()(images))


def test_small_stem_keeps_the_resolution():
    backbone = build_backbone("resnet18", "small", 8)
    seen = []
    backbone.layer1.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    backbone.layer4.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    backbone(torch.randn(1, 3, 32, 32).expand(2, -1, -1, -1))
    assert seen == [(2, 8, 32, 32), (2, 64, 4, 4)]
    assert backbone.conv1.weight.shape == (8, 3, 3, 3)


def test_width_scales_every_stage_and_its_initialisation():
    full, narrow = build_backbone("resnet50", "imagenet", 64), build_backbone("resnet50", "imagenet", 16)
    for (name, wide), (other, thin) in zip(full.named_parameters(), narrow.named_parameters(), strict=True):
        assert name == other
        expected = [n if n in (1, 3, 7) else n // 4 for n in wide.shape]
        assert list(thin.shape) == expected, name
    weight = narrow.layer4[0].conv2.weight  # Kaiming normal over the fan out
    assert abs(weight.std() / (2 / (128 * 9)) ** 0.5 - 1) < 0.02


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "resnet19"}, "name must be one of resnet18, resnet34, resnet50, got 'resnet19'"),
        ({"stem": "cifar"}, "stem must be one of imagenet, small, got 'cifar'"),
        ({"width": 0}, "width must be at least 1, got 0"),
    ],
)
def test_backbone_errors(arguments, words):
    with pytest.raises(ValueError, match=words):
        build_backbone(**arguments)


def test_heads():
    linear, mlp = ProjectionHead(12, 5, "linear"), ProjectionHead(12, 5, "mlp")
    assert [type(layer) for layer in linear] == [nn.Linear]
    assert [type(layer) for layer in mlp] == [nn.Linear, nn.ReLU, nn.Linear]
    assert [tuple(p.shape) for p in mlp.parameters()] == [(12, 12), (12,), (5, 12), (5,)]
    assert linear(torch.randn(3, 12)).shape == mlp(torch.randn(3, 12)).shape == (3, 5)
    with pytest.raises(ValueError, match="kind must be one of linear, mlp, mlp3, got 'conv'"):
        ProjectionHead(12, 5, "conv")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_normalisation_of_zero_and_tiny_and_large_rows(dtype):
    rows = torch.randn(5, 16).to(dtype)
    rows[1] = 0
    rows[2] *= 1e-3
    rows[3] *= 1e4
    rows.requires_grad_()
    unit = normalize_rows(rows)
    assert unit.dtype == torch.float32
    torch.testing.assert_close(unit.norm(dim=1), torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]))
    (unit * torch.randn(5, 16)).sum().backward()
    assert rows.grad.isfinite().all()
    assert (rows.grad[1] == 0).all() and (rows.grad[0] != 0).any()


def test_normalisation_gradient():
    rows = torch.randn(4, 7, requires_grad=True)
    weight = torch.randn(4, 7)
    (normalize_rows(rows) * weight).sum().backward()
    expected = torch.autograd.grad((nn.functional.normalize(rows.double(), dim=1) * weight).sum(), rows)[0]
    torch.testing.assert_close(rows.grad, expected)


def test_encoder_gives_float32_unit_rows_under_autocast():
    backbone = build_backbone("resnet18", "small", 4)
    encoder = Encoder(backbone, ProjectionHead(backbone.feature_dim, 6, "mlp"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = encoder(torch.randn(4, 3, 16, 16))
    assert rows.shape == (4, 6) and rows.dtype == torch.float32
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(4))
