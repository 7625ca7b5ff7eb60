"""BYOL and SimSiam: losses without negatives, by a predictor."""

import pytest
import torch
from torch.nn import functional

from iecl_fast.entropy import gaussian_entropy
from iecl_fast.ring import RingSchedule
from iecl_fast.ssl import BYOL, METHODS, SimSiam, build_method
from toys import Block, Normed, assert_same_state, train_step, two_views

SMALL = {"dim": 8, "hidden_dim": 16}
LOSSES = {"byol": "regression", "simsiam": "similarity"}


def build(name, **options):
    torch.manual_seed(0)
    return build_method(name, Normed(), **SMALL, **options)


@pytest.mark.parametrize("saib", [False, True])
def test_byols_loss_is_the_squared_distance_to_the_targets(saib):
    method = build("byol", saib=Block() if saib else None)
    views = two_views(8)
    loss = method(views)["regression"]
    expected = 0
    for online, other in (views, views[::-1]):
        target = functional.normalize(method.target_encoder.module.project(method.transform(other)), dim=1)
        prediction = functional.normalize(method.predictor(method.encoder.project(online)), dim=1)
        expected += (prediction - target).square().sum(dim=1).mean() / 2
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("saib", [False, True])
def test_simsiams_loss_is_minus_the_cosine_to_its_own_embeddings(saib):
    method = build("simsiam", saib=Block() if saib else None)
    views = two_views(8)
    losses = method(views)
    losses["similarity"].backward()
    own = [p.grad.clone() for p in method.encoder.parameters()]
    method.zero_grad()
    projections = [method.encoder.project(view) for view in views]
    targets = [method.encoder.project(method.transform(view)).detach() for view in views]
    expected = 0
    for projection, target in zip(projections, targets[::-1]):
        expected -= functional.cosine_similarity(method.predictor(projection), target).mean() / 2
    torch.testing.assert_close(losses["similarity"], expected)
    expected.backward()
    for ours, parameter in zip(own, method.encoder.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_the_block_learns_from_the_entropy_alone(name):
    method = build(name, saib=Block())
    losses = method(two_views(8))
    assert list(losses) == [LOSSES[name], "entropy"]
    losses[LOSSES[name]].backward(retain_graph=True)
    assert method.saib.conv.weight.grad is None
    assert all(p.grad is not None for p in (*method.encoder.parameters(), *method.predictor.parameters()))
    losses["entropy"].backward()
    assert method.saib.conv.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", LOSSES)
def test_the_entropy_is_of_the_transformed_views(name):
    method = build(name, saib=Block(), entropy_weight=0.5)
    views = two_views(8)
    losses = method(views)
    rows = [method.encoder(method.saib(view)) * 8**0.5 for view in views]
    expected = -0.5 * sum(gaussian_entropy(row, noise_floor=0.01) / 8 for row in rows) / 2
    torch.testing.assert_close(losses["entropy"], expected)


@pytest.mark.parametrize("name", LOSSES)
def test_without_the_entropy_the_block_stays_as_it_is(name):
    method = build(name, saib=Block(), entropy_weight=0.0)
    assert list(method(two_views(8))) == [LOSSES[name]]
    assert not method.saib.conv.weight.requires_grad


def test_byols_target_follows_and_takes_no_gradient():
    method = build("byol", momentum=0.5)
    optimizer = torch.optim.SGD(method.parameter_groups(0.0), lr=0.1)
    old = method.target_encoder.module.backbone.conv.weight.clone()
    train_step(method, two_views(8), optimizer)
    online = method.backbone.conv.weight
    torch.testing.assert_close(method.target_encoder.module.backbone.conv.weight, (old + online) / 2)
    assert not any(p.requires_grad for p in method.target_encoder.parameters())
    assert method.step == 1


@pytest.mark.parametrize("name", LOSSES)
def test_running_statistics_are_of_views_as_evaluation_sees_them(name):
    plain, blocked = build(name), build(name, saib=Block())
    views = two_views(8)
    for method in (plain, blocked):
        method(views)
    assert torch.equal(plain.backbone.norm.running_var, blocked.backbone.norm.running_var)


@pytest.mark.parametrize("name", LOSSES)
def test_resume_from_the_state_dict_is_exact(name):
    def make():
        torch.manual_seed(1)
        method = build(name, spectral=True, saib=Block())
        return method, torch.optim.SGD(method.parameter_groups(0.1), lr=0.1)

    batches = [two_views(8) for _ in range(4)]
    whole, optimizer = make()
    expected = [train_step(whole, views, optimizer)[LOSSES[name]].item() for views in batches]
    halted, optimizer = make()
    losses = [train_step(halted, views, optimizer)[LOSSES[name]].item() for views in batches[:2]]
    resumed, optimizer = make()
    resumed.load_state_dict(halted.state_dict())
    losses += [train_step(resumed, views, optimizer)[LOSSES[name]].item() for views in batches[2:]]
    assert losses == expected
    assert_same_state(whole, resumed)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("saib", [False, True])
def test_loss_falls(name, saib):
    torch.manual_seed(0)
    options = {"momentum": 0.9} if name == "byol" else {}
    method = build(name, saib=Block() if saib else None, **options)
    optimizer = torch.optim.SGD(method.parameter_groups(1e-4), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(100):
        colours = 2 * torch.randn(32, 3, 1, 1)
        views = [colours + torch.randn(32, 3, 4, 4) for _ in range(2)]
        losses.append(train_step(method, views, optimizer)[LOSSES[name]].item())
    assert sum(losses[-10:]) < sum(losses[:10]) - 2
    figures = method.diagnostics()
    assert all(type(value) is float for value in figures.values())
    assert ("entropy_query" in figures) == saib
    assert "ring_lower" not in figures


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_finite_under_autocast(name, dtype):
    method = build(name, saib=Block(), spectral=True)
    with torch.autocast("cpu", dtype=dtype):
        losses = method(two_views(8))
    sum(losses.values()).backward()
    assert all(loss.dtype == torch.float32 and loss.isfinite() for loss in losses.values())
    assert all(p.grad.isfinite().all() for p in method.parameters() if p.grad is not None)


def test_names_and_what_they_refuse():
    assert METHODS["byol"] is BYOL and METHODS["simsiam"] is SimSiam
    for name in LOSSES:
        assert build_method(name, Normed(), ring=None, saib=None, **SMALL).saib is None
        with pytest.raises(TypeError, match="ring"):
            build_method(name, Normed(), ring=RingSchedule(steps=1), **SMALL)
        for option, value in (("hidden_dim", 0), ("entropy_weight", -1.0), ("jacobian_steps", -1)):
            with pytest.raises(ValueError, match=f"{option} must be at least"):
                build_method(name, Normed(), **SMALL | {option: value})
