"""The module: parameters, what it refuses, copies and checkpoints, training."""

import copy
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

import iecl_fast
from iecl_fast import SAIB
from iecl_fast.saib import saib


def small(**options) -> SAIB:
    return SAIB(**{"channels": "batch", "batch_size": 6, "patch_size": 4, "image_size": (8, 12), **options})


def test_parameters_in_order_with_their_shapes():
    shapes = {name: tuple(p.shape) for name, p in small().named_parameters()}
    assert list(shapes.items()) == [
        ("position", (18, 16)),
        ("w1", (6, 6, 1, 1)),
        ("w2", (12, 6, 3, 3)),
        ("w3", (12, 12, 1, 1)),
        ("w4", (6, 12, 1, 1)),
    ]
    assert small(channels="patch", batch_size=None).w2.shape == (96, 48, 3, 3)
    assert "position" not in small(positional=False).state_dict()
    assert [name for name, _ in small(expansion="monotone").named_parameters()] == ["position", "w1", "w2", "w3"]
    names = list(small(cascade=3).state_dict())
    assert len(names) == 15 and names[:6] == [*shapes, "further.0.position"] and names[-1] == "further.1.w4"


@pytest.mark.parametrize(("expansion", "gain"), [("free", math.sqrt(2)), ("monotone", 1.0)])
def test_weights_start_kaiming_normal(expansion, gain):
    block = SAIB("patch", patch_size=8, image_size=16, expansion=expansion)
    for weight in (block.w1, block.w2, block.w3, block.w4):
        if weight is not None:
            assert weight.std().item() == pytest.approx(gain / math.sqrt(weight[0].numel()), rel=0.05)
    assert block.position.std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("channels", ["batch", "patch"])
@pytest.mark.parametrize("expansion", ["free", "monotone"])
def test_forward_is_the_function_of_its_parameters(channels, expansion):
    block = small(channels=channels, expansion=expansion, cascade=2)
    x = torch.randn(6, 3, 8, 12)
    expected = x
    for one in (block, block.further[0]):
        weights = one.position, one.w1, one.w2, one.w3, one.w4
        expected = saib(expected, *weights, patch_size=4, channels=channels, expansion=expansion)
    assert torch.equal(block(x), expected) and expected.shape == x.shape


def test_patch_mode_sees_each_image_by_itself():
    block = SAIB("patch", patch_size=4, image_size=(8, 12))
    x = torch.randn(7, 3, 8, 12)
    torch.testing.assert_close(block(x), torch.cat([block(image) for image in x.split(2)]), rtol=1e-5, atol=1e-5)


def test_deepcopy_and_state_dict_make_the_same_block():
    block, x = small(cascade=2), torch.randn(6, 3, 8, 12)
    other = small(cascade=2)
    assert not torch.equal(block(x), other(x))
    other.load_state_dict(block.state_dict())
    assert torch.equal(block(x), other(x)) and torch.equal(block(x), copy.deepcopy(block)(x))
    alone = small()
    alone.load_state_dict({k: v for k, v in block.state_dict().items() if not k.startswith("further")})
    assert all(torch.equal(p, block.state_dict()[name]) for name, p in alone.state_dict().items())


def test_moves_to_other_dtypes_and_memory_formats():
    block, x = small(), torch.randn(6, 3, 8, 12)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert copy.deepcopy(block).to(dtype)(x.to(dtype)).dtype == dtype
    channels_last = copy.deepcopy(block).to(memory_format=torch.channels_last)
    output = channels_last(x.to(memory_format=torch.channels_last))
    assert output.is_contiguous(memory_format=torch.channels_last) and torch.equal(output, block(x))


@pytest.mark.parametrize(("channels", "expansion"), [("batch", "free"), ("patch", "free"), ("patch", "monotone")])
def test_a_cascade_of_three_trains(channels, expansion):
    block = small(channels=channels, expansion=expansion, cascade=3)
    x, target = torch.randn(6, 3, 8, 12), torch.randn(6, 3, 8, 12)
    optimizer = torch.optim.Adam(block.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(block(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in block.parameters())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"channels": "image"}, ValueError, r"channels = 'image' .*'batch' or 'patch'"),
        ({"activation": "gelu"}, ValueError, r"activation = 'gelu' .*'relu' or 'silu'"),
        ({"expansion": "wide"}, ValueError, r"expansion = 'wide' .*'free' or 'monotone'"),
        ({"expansion": "monotone", "activation": "silu"}, ValueError, "activation = 'silu' .*never falls"),
        ({"batch_size": None}, ValueError, "batch_size is missing"),
        ({"batch_size": 0}, ValueError, "batch_size = 0 .*at least 1"),
        ({"batch_size": 2.5}, TypeError, "batch_size is a float.*int"),
        ({"patch_size": 5}, ValueError, r"image_size has 8 x 12 pixels.*patch_size = 5"),
        ({"patch_size": 0}, ValueError, "patch_size = 0 .*at least 1"),
        ({"patch_size": True}, TypeError, "patch_size is a bool"),
        ({"image_size": (8, 13)}, ValueError, "8 x 13 pixels.*patch_size = 4"),
        ({"image_size": (8, "12")}, TypeError, "image_size is a str"),
        ({"image_size": (8, 12, 3)}, ValueError, r"image_size = \(8, 12, 3\).*\(height, width\)"),
        ({"image_size": 8.0}, TypeError, "image_size is a float"),
        ({"cascade": 0}, ValueError, "cascade = 0 .*at least 1"),
    ],
)
def test_what_cannot_be_built(options, error, message):
    with pytest.raises(error, match=message):
        small(**options)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(5, 3, 8, 12), ValueError, r"5 images.*built for batches of 6.*drop_last.*channels=\"patch\""),
        (torch.zeros(6, 1, 8, 12), ValueError, "1 channels.*built for 3"),
        (torch.zeros(6, 3, 8, 13), ValueError, "8 x 13 pixels.*patch_size = 4"),
        (torch.zeros(6, 3, 12, 8), ValueError, "12 x 8 pixels.*built for 8 x 12"),
        (torch.zeros(3, 8, 12), ValueError, r"shape \(3, 8, 12\).*\(N, channels, height, width\)"),
        (torch.zeros(6, 3, 8, 12, dtype=torch.int64), TypeError, "int64.*float32, float16, bfloat16, float64"),
        (torch.zeros(6, 3, 8, 12, dtype=torch.float16), TypeError, "float32 and x torch.float16"),
        (torch.zeros(6, 3, 8, 12, device="meta"), ValueError, "position is on cpu and x on meta"),
        ([1, 2], TypeError, "x is a list"),
    ],
)
def test_what_cannot_be_put_in(x, error, message):
    with pytest.raises(error, match=message):
        small()(x)


def test_functional_form_names_the_argument():
    block, x = small(), torch.zeros(6, 3, 8, 12)
    weights = {"position": block.position, "w1": block.w1, "w2": block.w2, "w3": block.w3, "w4": block.w4}
    for name in weights:
        wrong = weights | {name: weights[name].detach().flatten()}
        with pytest.raises(ValueError, match=f"{name} has the shape"):
            saib(x, **wrong, patch_size=4)
        if name != "position":
            with pytest.raises(TypeError, match=f"{name} is a NoneType"):
                saib(x, **(weights | {name: None}), patch_size=4)
    with pytest.raises(ValueError, match="w4 is not allowed with expansion"):
        saib(x, **weights, patch_size=4, expansion="monotone")
    with pytest.raises(TypeError, match="patch_size is a float"):
        saib(x, **weights, patch_size=4.0)
    with pytest.raises(ValueError, match="D = 48, channels"):
        saib(x, **weights, patch_size=4, channels="patch")


def test_says_what_it_is():
    assert "batch_size=6, patch_size=4, image_size=(8, 12)" in repr(small())
    assert "cascade=2" in repr(small(channels="patch", cascade=2))
    assert "SAIB" in iecl_fast.__all__


def test_import_takes_torch_alone():
    code = (
        "import iecl_fast, sys; print([m for m in ('triton', 'torchvision', 'lightning_fabric') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    alone = subprocess.run(
        [sys.executable, "-c", code.replace("iecl_fast", "torch", 1)], check=True, capture_output=True, text=True
    )
    assert run.stdout == alone.stdout
