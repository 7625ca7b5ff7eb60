import copy
import math

import pytest
import torch
from small import Pixels, assert_resumes_exactly, images, train_step
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from iecl_fast.ring import AdaptiveRingSchedule, RingSchedule, ring_ranks
from iecl_fast.ssl import InstanceDiscrimination, build_method


def build(num_images=20, **options):
    return InstanceDiscrimination(Pixels(), num_images=num_images, dim=8, **{"num_samples": 50, **options})


def dense_draws(queries, bank, index, percentiles, uniform):
    """Similarities (N, m) of the drawn entries: sort the others, cut the ring, order it by place, draw."""
    rows = []
    for query, own, numbers in zip(queries, index.tolist(), uniform, strict=True):
        others = torch.tensor([i for i in range(len(bank)) if i != own])
        similarity = (bank @ query)[others]
        first, end = ring_ranks(*percentiles, len(others))
        ring = others[similarity.argsort(stable=True)[first:end]].sort().values
        rows.append(bank[ring[(numbers * len(ring)).long()]] @ query)
    return torch.stack(rows)


def draws_as_drawn(seed, n, m):
    """The uniform numbers that ring_sample takes after this seed."""
    torch.manual_seed(seed)
    return torch.rand(n, m, dtype=torch.float64)


@pytest.mark.parametrize("ring", [None, RingSchedule(lower=(40, 60), upper=90, steps=4)])
@pytest.mark.parametrize("loss", ["softmax", "nce"])
def test_loss_and_gradient_are_those_of_a_dense_form(ring, loss):
    method = build(ring=ring, loss=loss, temperature=0.1)
    reference = copy.deepcopy(method.encoder)
    view, index = images(), torch.tensor([3, 0, 19, 7, 3, 11])
    bank = method.contrast.bank.keys.clone()
    torch.manual_seed(5)
    value = method([view], index)["contrast"]
    value.backward()

    queries = normalize(reference.head(reference.backbone(view)), dim=1)
    draws = dense_draws(queries, bank, index, method.percentiles(), draws_as_drawn(5, 6, 50)) / 0.1
    positives = (queries * bank[index]).sum(1, keepdim=True) / 0.1
    if loss == "softmax":
        expected = cross_entropy(torch.cat([positives, draws], dim=1), torch.zeros(6, dtype=torch.int64))
    else:
        ring_size = 1000.0  # any: it cancels out
        normalizer = ring_size * draws.exp().mean().detach()
        own, noise = positives.exp() / normalizer, draws.exp() / normalizer
        odds = 50 / ring_size  # m P_n
        expected = -((own / (own + odds)).log() + (odds / (noise + odds)).log().sum(1, keepdim=True)).mean()
    expected.backward()
    torch.testing.assert_close(value, expected)
    for ours, theirs in zip(method.encoder.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)


def test_the_own_entry_is_no_negative():
    """The bank holds the queries themselves: as a negative, the own entry alone would cost log 2 in each draw."""
    method = build(num_images=6, temperature=0.01, head="linear")
    view, index = images(), torch.arange(6)
    with torch.no_grad():
        method.contrast.bank.keys.copy_(method.encoder(view))
        others = method.contrast.bank.keys @ method.contrast.bank.keys.T - 9 * torch.eye(6)
        assert others.max() < 0.9
        assert method([view], index)["contrast"] < 0.01


def test_entries_move_once_by_the_last_of_their_embeddings():
    method = build(momentum=0.5)
    before = method.contrast.bank.keys.clone()
    view, index = images(), torch.tensor([4, 9, 4, 0, 9, 4])
    queries = method.encoder(view).detach()
    train_step(method, [view], index)
    expected = before.clone()
    expected[[4, 9, 0]] = normalize(before[[4, 9, 0]] + queries[[5, 4, 3]], dim=1)
    torch.testing.assert_close(method.contrast.bank.keys, expected)
    assert method.step == 1
    method.after_step()
    torch.testing.assert_close(method.contrast.bank.keys, expected)  # not a second time


def test_accumulated_batches_are_all_remembered():
    method = build(momentum=0.0)
    views, index = [images(3), images(5)], [torch.tensor([1, 2, 3]), torch.tensor([3, 4, 5, 6, 7])]
    for view, rows in zip(views, index, strict=True):
        method([view], rows)["contrast"].backward()
    with torch.no_grad():
        expected = [method.encoder(view) for view in views]
    method.after_step()
    torch.testing.assert_close(method.contrast.bank.keys[[1, 2]], expected[0][:2])
    torch.testing.assert_close(method.contrast.bank.keys[3:8], expected[1])


def test_the_normaliser_runs():
    method = build(loss="nce", temperature=0.2)
    log_means = []
    for step in range(4):
        view, index = images(), torch.arange(6) + step
        with torch.no_grad():
            draws = dense_draws(
                method.encoder(view), method.contrast.bank.keys, index, (0, 100), draws_as_drawn(step, 6, 50)
            )
        log_means.append((draws / 0.2).exp().mean().log())
        torch.manual_seed(step)
        train_step(method, [view], index)
        running = log_means[0].exp()
        for log_mean in log_means[1:]:
            running = 0.9 * running + 0.1 * log_mean.exp()
        torch.testing.assert_close(method.contrast.log_normalizer, running.log())


def test_evaluation_mode_leaves_no_trace():
    for loss in ("softmax", "nce"):
        method = build(loss=loss).eval()
        before = copy.deepcopy(method.state_dict())
        assert method([images()], torch.arange(6))["contrast"].isfinite()
        method.after_step()
        after = method.state_dict()
        for name in before.keys() - {"step"}:
            torch.testing.assert_close(after[name], before[name], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("loss", ["softmax", "nce"])
def test_resumes_exactly_in_mid_anneal(loss):
    assert_resumes_exactly(lambda: build(ring=RingSchedule(lower=(0, 60), upper=90, steps=6), loss=loss))


def test_an_adaptive_ring_is_in_the_state():
    method = build(ring=AdaptiveRingSchedule(lower=(0, 60), upper=90, steps=6))
    method.ring.observe(3.0)
    assert method.percentiles() == (10, 90)
    other = build(ring=AdaptiveRingSchedule(lower=(0, 60), upper=90, steps=6))
    other.load_state_dict(method.state_dict())
    assert other.percentiles() == (10, 90)


def test_diagnostics_are_plain_numbers():
    method = build(ring=RingSchedule(lower=(0, 80), upper=90, steps=4))
    view, index = images(), torch.arange(6)
    with torch.no_grad():
        expected = (method.encoder(view) * method.contrast.bank.keys[index]).sum(1).mean()
    train_step(method, [view], index)
    diagnostics = method.diagnostics()
    assert diagnostics == {
        "ring_lower": 20.0,
        "ring_upper": 90.0,
        "positive_similarity": pytest.approx(expected.item(), abs=1e-6),
    }
    assert all(type(value) is float for value in diagnostics.values())


@pytest.mark.parametrize("loss", ["softmax", "nce"])
@pytest.mark.parametrize("temperature", [0.005, 0.01, 0.07, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_with_a_zero_row_at_any_temperature_and_precision(loss, temperature, dtype):
    method = build(temperature=temperature, loss=loss)
    with torch.no_grad():  # a black image then has the zero embedding
        method.encoder.backbone.linear.bias.zero_()
        method.encoder.head[0].bias.zero_()
    view, index = images(), torch.arange(6)
    view[2] = 0
    for _ in range(2):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            value = method([view], index)["contrast"]
        value.backward()
        method.after_step()
        assert value.dtype == torch.float32 and value.isfinite()
        assert all(p.grad.isfinite().all() for p in method.encoder.parameters())
    torch.testing.assert_close(method.contrast.bank.keys.norm(dim=1), torch.ones(20))


@pytest.mark.parametrize("ring", [None, RingSchedule(lower=(0, 80), upper=90, steps=5)])
def test_compiled_gives_the_eager_results_while_the_schedule_moves(ring):
    eager = build(num_images=12, ring=ring)
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, backend="aot_eager")
    for step in range(3):
        view, index = images(), torch.arange(6)
        torch.manual_seed(step)
        expected = train_step(eager, [view], index)["contrast"]
        torch.manual_seed(step)
        value = compiled([view], index)["contrast"]
        value.backward()
        other.after_step()
        assert value.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", ["softmax", "nce"])
def test_learns_what_the_views_share(loss):
    torch.manual_seed(0)
    method = InstanceDiscrimination(Pixels(), num_images=64, dim=8, num_samples=256, temperature=0.2, loss=loss)
    prototypes = images(64)
    optimizer = torch.optim.SGD(method.encoder.parameters(), lr=0.03 if loss == "softmax" else 0.003, momentum=0.9)
    similarities = []
    for _ in range(150):
        index = torch.randperm(64)[:32]
        train_step(method, [prototypes[index] + 0.3 * images(32)], index, optimizer)
        similarities.append(method.diagnostics()["positive_similarity"])
    queries = method.encoder(prototypes)
    found = (queries @ method.contrast.bank.keys.T).argmax(dim=1) == torch.arange(64)
    assert similarities[0] < 0.3 and similarities[-1] > 0.8
    assert found.float().mean() > 0.9


def test_build_method_and_its_errors():
    method = build_method("ir", Pixels(), num_images=9, dim=4, ring=None)
    assert isinstance(method, InstanceDiscrimination) and method.num_views == 1
    assert method.contrast.bank.keys.shape == (9, 4) and method.contrast.num_samples == 4096
    assert isinstance(method.encoder.head[0], nn.Linear) and math.isclose(method.contrast.temperature, 0.07)
    with pytest.raises(TypeError, match="num_images"):
        build_method("ir", Pixels())
    for options, words in [
        ({"temperature": 0.0}, r"temperature = 0\.0 is not allowed: a positive number"),
        ({"temperature": math.inf}, "temperature = inf is not allowed"),
        ({"num_images": 1}, "num_images must be at least 2, .* got 1"),
        ({"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ({"loss": "hinge"}, "loss must be one of softmax, nce, got 'hinge'"),
        ({"momentum": 2.0}, "momentum must lie in"),
    ]:
        with pytest.raises(ValueError, match=words):
            build(**options)
    with pytest.raises(ValueError, match="views must be a list of 1 tensor, got 2"):
        build()([images(), images()], torch.arange(6))
    with pytest.raises(ValueError, match="index must hold each image's place"):
        build()([images()])
    with pytest.raises(ValueError, match=r"index must lie in 0\.\.19, got 20"):
        build()([images()], torch.arange(15, 21))
