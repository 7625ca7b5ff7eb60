import copy

import pytest
import torch
from small import Pixels, assert_resumes_exactly, images, train_step
from torch.nn.functional import cross_entropy, normalize

from iecl_fast.ring import RingSchedule
from iecl_fast.ring.reference import ring_sample as plain_ring_sample
from iecl_fast.ssl import CMC, LabBackbone, build_lab_backbone, build_method
from iecl_fast.ssl.cmc import LAB_RANGE, rgb_to_lab

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)

# The published CIE L*a*b* (D65) of sRGB's corners.
COLOURS = {
    (1, 1, 1): (100, 0, 0),
    (0, 0, 0): (0, 0, 0),
    (1, 0, 0): (53.2408, 80.0925, 67.2032),
    (0, 1, 0): (87.7347, -86.1827, 83.1793),
    (0, 0, 1): (32.2970, 79.1875, -107.8602),
    (1, 1, 0): (97.1393, -21.5537, 94.4780),
    (0, 1, 1): (91.1132, -48.0875, -14.1312),
    (1, 0, 1): (60.3242, 98.2343, -60.8249),
    (0.5, 0.5, 0.5): (53.3890, 0, 0),
    (0.02, 0.02, 0.02): (1.3983, 0, 0),  # both curves are straight lines here: 903.3 * 0.02 / 12.92
}


def build(num_images=20, **options):
    backbone = LabBackbone(Pixels(1), Pixels(2), mean=MEAN, std=STD)
    return CMC(backbone, num_images=num_images, dim=8, **{"num_samples": 50, **options})


def test_lab_of_known_colours():
    colours = torch.tensor(list(COLOURS), dtype=torch.float64)
    lab = rgb_to_lab(colours[:, :, None, None].expand(-1, -1, 2, 3))
    assert lab.dtype == torch.float32 and lab.shape == (10, 3, 2, 3)
    expected = torch.tensor(list(COLOURS.values()))[:, :, None, None].expand_as(lab)
    torch.testing.assert_close(lab, expected, atol=2e-3, rtol=1e-4)


def test_lab_lies_in_its_range_and_grey_has_no_colour():
    levels = torch.linspace(0, 1, 18)
    lab = rgb_to_lab(torch.cartesian_prod(levels, levels, levels)[:, :, None, None])[:, :, 0, 0]
    for channel, (low, high) in zip(lab.T, LAB_RANGE, strict=True):
        assert low - 1e-4 <= channel.min() < low + 0.02 and high - 0.02 < channel.max() <= high + 1e-4
    grey = rgb_to_lab(levels[:, None, None, None].expand(-1, 3, 1, 1))
    assert grey[:, 1:].abs().max() < 1e-3


def test_the_split_undoes_the_standardisation():
    backbone = build().backbone
    pixels = torch.rand(2, 3, 4, 4)
    standardised = (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        luminance, chroma = backbone.split(standardised)
    low, high = torch.tensor(LAB_RANGE).T[..., None, None]
    expected = (rgb_to_lab(pixels) - low) / (high - low) * 2 - 1
    torch.testing.assert_close(torch.cat([luminance, chroma], dim=1), expected, atol=1e-5, rtol=0)
    white = torch.full((1, 3, 4, 4), 9.0)  # beyond 1 before it is standardised
    torch.testing.assert_close(backbone.split(white)[0], torch.ones(1, 1, 4, 4))


def dense_loss(queries, bank, index, percentiles, uniform, temperature):
    draws, _ = plain_ring_sample(queries.double(), bank.double(), *percentiles, index, uniform)
    positives = (queries.double() * bank[index].double()).sum(1, keepdim=True)
    logits = torch.cat([positives, draws], dim=1) / temperature
    return cross_entropy(logits, torch.zeros(len(queries), dtype=torch.int64))


@pytest.mark.parametrize("ring", [None, RingSchedule(lower=(30, 60), upper=90, steps=4)])
def test_losses_and_gradients_cross_the_banks(ring):
    method = build(ring=ring, temperature=0.1)
    reference = copy.deepcopy(method)
    view, index = images(), torch.tensor([3, 0, 19, 7, 3, 11])
    torch.manual_seed(5)
    losses = method([view], index)
    sum(losses.values()).backward()

    torch.manual_seed(5)
    uniform = [torch.rand(6, 50, dtype=torch.float64) for _ in range(2)]
    luminance, chroma = reference.backbone.split(view)
    luminance = normalize(reference.luminance_head(reference.backbone.luminance(luminance)), dim=1)
    chroma = normalize(reference.chroma_head(reference.backbone.chroma(chroma)), dim=1)
    bank_of_l, bank_of_ab = reference.luminance_contrast.bank.keys, reference.chroma_contrast.bank.keys
    expected = {
        "contrast_luminance": dense_loss(luminance, bank_of_ab, index, method.percentiles(), uniform[0], 0.1),
        "contrast_chroma": dense_loss(chroma, bank_of_l, index, method.percentiles(), uniform[1], 0.1),
    }
    sum(expected.values()).backward()
    assert losses.keys() == expected.keys()
    for name, value in losses.items():
        torch.testing.assert_close(value.double(), expected[name], atol=1e-5, rtol=1e-5)
    for (name, ours), theirs in zip(method.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-3, msg=name)

    method.after_step()
    expected_l, expected_ab = bank_of_l.clone(), bank_of_ab.clone()
    rows = torch.tensor([4, 1, 2, 3, 5])  # of 3 the last
    expected_l[index[rows]] = normalize(bank_of_l[index[rows]] + luminance[rows].detach(), dim=1)
    expected_ab[index[rows]] = normalize(bank_of_ab[index[rows]] + chroma[rows].detach(), dim=1)
    torch.testing.assert_close(method.luminance_contrast.bank.keys, expected_l)
    torch.testing.assert_close(method.chroma_contrast.bank.keys, expected_ab)


def test_evaluation_has_both_networks_features():
    backbone = build_lab_backbone("resnet18", "small", 8, mean=MEAN, std=STD).eval()
    view = torch.randn(3, 3, 16, 16)
    features = backbone(view)
    luminance, chroma = backbone.split(view)
    assert features.shape == (3, backbone.feature_dim) == (3, 64)
    assert torch.equal(features[:, :32], backbone.luminance(luminance))
    assert torch.equal(features[:, 32:], backbone.chroma(chroma))
    assert backbone.luminance.conv1.weight.shape == (4, 1, 3, 3)
    assert backbone.chroma.conv1.weight.shape == (4, 2, 3, 3)
    assert not {"mean", "std", "low", "high"} & set(backbone.state_dict())
    with pytest.raises(ValueError, match=r"width must be even, .* got 7"):
        build_lab_backbone("resnet18", "small", 7, mean=MEAN, std=STD)


@pytest.mark.parametrize("loss", ["softmax", "nce"])
def test_resumes_exactly_in_mid_anneal(loss):
    assert_resumes_exactly(lambda: build(ring=RingSchedule(lower=(0, 60), upper=90, steps=6), loss=loss))


def test_evaluation_mode_leaves_no_trace():
    method = build().eval()
    before = copy.deepcopy(method.state_dict())
    method([images()], torch.arange(6))
    method.after_step()
    after = method.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name != "step")


def test_learns_what_lightness_and_colour_share():
    torch.manual_seed(0)
    method = build(64, num_samples=256, temperature=0.2)
    prototypes = images(64)
    optimizer = torch.optim.SGD(method.parameters(), lr=0.03, momentum=0.9)
    similarities = []
    for _ in range(150):
        index = torch.randperm(64)[:32]
        train_step(method, [prototypes[index]], index, optimizer)
        similarities.append(method.diagnostics()["positive_similarity"])
    assert similarities[0] < 0.3 and similarities[-1] > 0.7
    found = (method.luminance_contrast.bank.keys @ method.chroma_contrast.bank.keys.T).argmax(dim=1)
    assert (found == torch.arange(64)).float().mean() > 0.8


def test_build_method_diagnostics_and_errors():
    method = build_method("cmc", build().backbone, num_images=9, dim=4, ring=RingSchedule(lower=20, upper=80, steps=1))
    assert isinstance(method, CMC) and method.num_views == 1
    train_step(method, [images()], torch.arange(6))
    diagnostics = method.diagnostics()
    assert (diagnostics["ring_lower"], diagnostics["ring_upper"]) == (20, 80)
    assert -1 < diagnostics["positive_similarity"] < 1
    with pytest.raises(ValueError, match="index must hold"):
        method([images()])
