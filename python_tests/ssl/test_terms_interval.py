"""The information terms at every n-th step only: what they weigh there, and what stands in for them between."""

import pytest
import torch

from iecl_fast.ssl import BYOL, IECL, MoCo, SimSiam
from toys import Block, Flat, Normed, assert_same_state, train_step, two_views

SMALL = {
    IECL: {"dim": 8, "hidden_dim": 16, "num_keys": 32},
    MoCo: {"dim": 8, "num_keys": 32},
    BYOL: {"dim": 8, "hidden_dim": 16},
    SimSiam: {"dim": 8, "hidden_dim": 4},
}
METHODS = list(SMALL)


def build(method=IECL, backbone=Flat, **options):
    torch.manual_seed(0)
    if method is IECL:
        options = {"spectral": False} | options
    return method(backbone(), saib=Block(), **SMALL[method], **options)


def gradients(method, views, only=None):
    losses = method(views)
    sum(loss for name, loss in losses.items() if only is None or name in only).backward()
    return {name: p.grad for name, p in method.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", METHODS)
def test_the_terms_count_n_times_and_read_as_ever(kind):
    views = two_views()
    every, third = build(kind), build(kind, terms_interval=3)
    losses, lazy = every(views), third(views)
    assert losses.keys() == lazy.keys() and "entropy" in losses
    for name in losses:
        torch.testing.assert_close(lazy[name], losses[name])
    terms = [name for name in losses if name in ("kl", "entropy")]
    of_terms = gradients(build(kind), views, terms)
    threefold = gradients(build(kind, terms_interval=3), views, terms)
    assert of_terms.keys() == threefold.keys() and any(name.startswith("saib") for name in of_terms)
    for name, gradient in of_terms.items():
        torch.testing.assert_close(threefold[name], 3 * gradient)


@pytest.mark.parametrize("kind", METHODS)
def test_between_the_terms_are_constants_and_the_block_has_a_gradient_of_zero(kind):
    method, views = build(kind, terms_interval=3), two_views()
    first = {name: loss.item() for name, loss in train_step(method, views).items()}
    method.zero_grad()
    contrast = next(iter(first))
    for _ in range(2):
        expected = gradients(build_like(method, kind), views, [contrast])
        found = gradients(method, views)
        losses = method(views)
        assert {name: losses[name].item() for name in ("kl", "entropy") if name in first} == {
            name: first[name] for name in ("kl", "entropy") if name in first
        }
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected.get(name, torch.zeros_like(gradient)))
        assert all(not found[f"saib.{name}"].any() for name, _ in method.saib.named_parameters())
        method.zero_grad()
        method.after_step()
    train_step(method, views)  # the third step has them again
    assert any(parameter.grad.any() for parameter in method.saib.parameters())


def build_like(method, kind):
    """The same state in a method whose terms have no weight."""
    other = build(kind, **({"kl_weight": 0.0} if kind is IECL else {}), entropy_weight=0.0)
    state = {name: value for name, value in method.state_dict().items() if name != "terms.values"}
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize(("kind", "passes"), [(IECL, 1), (MoCo, 1), (BYOL, 2)])
def test_between_the_encoder_runs_as_often_as_without_terms(kind, passes):
    method, views, calls = build(kind, Normed, terms_interval=2), two_views(size=6), []
    method.encoder.backbone.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    train_step(method, views)
    assert len(calls) == 2 * passes
    calls.clear()
    train_step(method, views)
    assert len(calls) == passes


def test_simsiam_needs_no_gradient_of_its_targets_between():
    method, views, calls = build(SimSiam, Normed, terms_interval=2), two_views(size=6), []
    method.encoder.backbone.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    train_step(method, views)
    train_step(method, views)
    assert calls == [True] * 4 + [True, True, False, False]


@pytest.mark.parametrize("kind", METHODS)
def test_a_resumed_training_goes_on_and_logs_alike(kind):
    views = [two_views() for _ in range(5)]
    whole, halted = build(kind, terms_interval=3), build(kind, terms_interval=3)
    logged = [(values(train_step(whole, pair)), whole.diagnostics()) for pair in views]
    for pair in views[:2]:  # halted between two steps that have the terms
        train_step(halted, pair)
    resumed = build(kind, terms_interval=3)
    resumed.load_state_dict(halted.state_dict())
    for pair, expected in zip(views[2:], logged[2:], strict=True):
        assert (values(train_step(resumed, pair)), resumed.diagnostics()) == expected
    assert "entropy_query" in logged[1][1]
    assert_same_state(whole, resumed)


def values(losses):
    return {name: loss.item() for name, loss in losses.items()}


@pytest.mark.parametrize("interval", [0, -1])
def test_an_interval_below_one_is_refused(interval):
    with pytest.raises(ValueError, match=f"terms_interval must be at least 1, got {interval}"):
        build(terms_interval=interval)


@pytest.mark.parametrize("kind", METHODS)
def test_evaluation_mode_leaves_no_trace(kind):
    method = build(kind, terms_interval=2)
    train_step(method, two_views())
    train_step(method, two_views())  # the next one has the terms
    other = build(kind, terms_interval=2)
    other.load_state_dict(method.state_dict())
    assert method.eval().has_terms()
    method(two_views())
    assert_same_state(method, other)
