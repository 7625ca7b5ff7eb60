"""SimCLR: the loss of the paper, negatives from the ring, the block on the second view."""

import math

import pytest
import torch

from iecl_fast.ring import RingSchedule, ring_ranks
from iecl_fast.ssl import SimCLR, build_method
from iecl_fast.ssl.simclr import percentiles_below_itself
from toys import Block, Flat, Normed, assert_same_state, train_step, two_views


def build(**options):
    torch.manual_seed(0)
    return SimCLR(Flat(), **{"dim": 8, "temperature": 0.3, **options})


def losses_by_loops(first, second, temperature, lower=0, upper=100):
    """Each query's negatives sorted by similarity, those of the ring kept, the positive put in front."""
    keys = torch.cat([first, second])
    n = len(first)
    ranks = slice(*ring_ranks(lower, upper, 2 * n - 2))
    losses = []
    for own in range(2 * n):
        positive = (own + n) % (2 * n)
        others = [i for i in range(2 * n) if i not in (own, positive)]
        similarities = (keys[others] @ keys[own]).sort(stable=True).values[ranks]
        logits = torch.cat([(keys[own] @ keys[positive])[None], similarities]) / temperature
        losses.append(-torch.log_softmax(logits, dim=0)[0])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("percentiles", [(0, 100), (0, 70), (30, 90), (50, 100)])
@pytest.mark.parametrize("saib", [False, True])
def test_loss_and_gradient(percentiles, saib):
    ring = RingSchedule(lower=percentiles[0], upper=percentiles[1], steps=1)
    method = build(ring=ring, saib=Block() if saib else None, entropy_weight=0.0)
    views = two_views(7)
    loss = method(views)["contrast"]
    loss.backward()
    own = [p.grad.clone() for p in method.parameters()]
    method.zero_grad()
    first, second = method.encoder(views[0]), method.encoder(method.transform(views[1]))
    expected = losses_by_loops(first, second, 0.3, *percentiles)
    torch.testing.assert_close(loss, expected)
    expected.backward()
    for ours, parameter in zip(own, method.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, atol=1e-6, rtol=1e-4)


def test_without_a_ring_all_other_images_are_negatives():
    method = build()
    views = two_views(5)
    expected = losses_by_loops(*(method.encoder(view) for view in views), 0.3)
    torch.testing.assert_close(method(views)["contrast"], expected)
    assert list(method(views)) == ["contrast"]


@pytest.mark.parametrize("others", [1, 2, 7, 62, 510, 8190])
def test_the_ring_is_of_the_others_alone(others):
    """What excludes the query by its rank keeps the ranks that the percentiles have among the others."""
    for lower, upper in [(0, 100), (0, 99), (0.07, 100), (33.3, 66.7), (90, 99)]:
        try:
            expected = ring_ranks(lower, upper, others)
        except ValueError:
            continue
        translated = percentiles_below_itself(lower, upper, others=others)
        assert ring_ranks(*translated, others + 1) == expected


def test_images_that_are_all_the_same_are_finite():
    method = build()
    image = torch.ones(5, 3, 4, 4)
    loss = method([image, image])["contrast"]
    assert loss.item() == pytest.approx(math.log(9), rel=1e-4)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in method.parameters())


@pytest.mark.parametrize("temperature", [0.005, 0.01, 0.07, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_finite_with_a_zero_row_under_autocast(temperature, dtype):
    method = build(temperature=temperature, head="linear")
    with torch.no_grad():  # a black image then has the zero embedding
        method.backbone.linear.bias.zero_()
        method.encoder.head[0].bias.zero_()
    views = two_views()
    views[0][2] = 0
    with torch.autocast("cpu", dtype=dtype):
        loss = method(views)["contrast"]
    loss.backward()
    assert loss.dtype == torch.float32 and loss.isfinite()
    assert all(p.grad.isfinite().all() for p in method.parameters())


def test_the_block_learns_from_contrast_and_entropy():
    method = build(saib=Block())
    for term in ("contrast", "entropy"):
        method.zero_grad()
        method(two_views())[term].backward()
        assert method.saib.conv.weight.grad.abs().sum() > 0, term
    assert build(saib=Block(), entropy_weight=0.0).saib.conv.weight.requires_grad


def test_the_schedule_moves_and_resumes():
    def make():
        torch.manual_seed(0)
        ring = RingSchedule(lower=(0, 60), upper=90, steps=6)
        method = SimCLR(Normed(), dim=8, spectral=True, saib=Block(), ring=ring)
        return method, torch.optim.SGD(method.parameter_groups(0.1), lr=0.1)

    batches = [two_views(10) for _ in range(6)]
    whole, optimizer = make()
    expected = [train_step(whole, views, optimizer)["contrast"].item() for views in batches]
    halted, optimizer = make()
    losses = [train_step(halted, views, optimizer)["contrast"].item() for views in batches[:3]]
    assert halted.diagnostics()["ring_lower"] == 30
    resumed, optimizer = make()
    resumed.load_state_dict(halted.state_dict())
    losses += [train_step(resumed, views, optimizer)["contrast"].item() for views in batches[3:]]
    assert losses == expected
    assert_same_state(whole, resumed)


@pytest.mark.parametrize("ring", [None, RingSchedule(lower=(0, 30), upper=95, steps=60)])
@pytest.mark.parametrize("saib", [False, True])
def test_learns_what_the_views_share(ring, saib):
    torch.manual_seed(0)
    method = SimCLR(Flat(), dim=16, temperature=0.2, ring=ring, saib=Block() if saib else None)
    optimizer = torch.optim.SGD(method.parameter_groups(1e-4), lr=0.03, momentum=0.9)
    losses = []
    for _ in range(150):
        views = [2 * torch.randn(32, 3, 4, 4) for _ in range(2)]
        views[1][:, 0] = views[0][:, 0]  # one channel agrees, the others are noise
        losses.append(train_step(method, views, optimizer)["contrast"].item())
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


def test_a_batch_of_one_has_no_negatives():
    with pytest.raises(ValueError, match="views hold 1 image; at least 2 are allowed"):
        build()(two_views(1))


def test_errors():
    with pytest.raises(ValueError, match=r"temperature = 0\.0 is not allowed: a positive number"):
        build(temperature=0.0)
    with pytest.raises(ValueError, match="views must be a list of 2 tensors, got 1"):
        build()([torch.zeros(2, 3, 4, 4)])
    with pytest.raises(TypeError, match="num_keys"):
        build_method("simclr", Flat(), num_keys=8)
