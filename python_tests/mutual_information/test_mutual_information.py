import math
from statistics import mean, stdev

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal
from torch.nn.functional import cross_entropy

from iecl_fast import ring_sample
from iecl_fast.mutual_information import CorrelatedGaussians, contrastive_information, draw_above


@pytest.fixture(autouse=True)
def same_numbers_in_every_run():
    torch.manual_seed(0)


def scores_of(information, n=256, candidates=8192, dim=8):
    """positive scores (n,), queries and candidate keys as features."""
    gaussians = CorrelatedGaussians(dim, information)
    x, y = gaussians.pairs(n)
    queries = gaussians.queries(x)
    return (queries * gaussians.keys(y)).sum(dim=1), queries, gaussians.keys(torch.randn(candidates, dim))


def test_it_is_log_m_plus_1_less_the_loss():
    positives, negatives = torch.randn(5, requires_grad=True), torch.randn(5, 7)
    estimate = contrastive_information(positives, negatives)
    loss = cross_entropy(torch.cat([positives[:, None], negatives], dim=1), torch.zeros(5, dtype=torch.int64))
    torch.testing.assert_close(estimate, math.log(8) - loss)
    estimate.backward()
    assert (positives.grad > 0).all()
    assert contrastive_information(torch.full((3,), 1e4), torch.zeros(3, 7)) == pytest.approx(math.log(8))


@pytest.mark.parametrize("information", [0.5, 2.0, 6.0])
def test_the_critic_is_the_log_ratio_of_densities(information):
    gaussians = CorrelatedGaussians(5, information)
    x, y = gaussians.pairs(1000)
    r = gaussians.correlation
    assert -0.5 * 5 * math.log(1 - r**2) == pytest.approx(information)
    joint = MultivariateNormal(torch.zeros(2).double(), torch.tensor([[1, r], [r, 1]], dtype=torch.float64))
    normal = Normal(torch.zeros(()).double(), 1)
    x, y = x.double(), y.double()
    exact = (joint.log_prob(torch.stack([x, y], dim=-1)) - normal.log_prob(x) - normal.log_prob(y)).sum(dim=1)
    scores = (gaussians.queries(x) * gaussians.keys(y)).sum(dim=1)
    torch.testing.assert_close(scores, exact, atol=1e-10, rtol=1e-10)


def test_pairs_have_their_correlation_and_information():
    gaussians = CorrelatedGaussians(3, 1.5)
    x, y = gaussians.pairs(100_000)
    for values in (x, y):
        torch.testing.assert_close(values.T.cov(), torch.eye(3), atol=0.02, rtol=0)
    torch.testing.assert_close((x * y).mean(dim=0), torch.full((3,), gaussians.correlation), atol=0.02, rtol=0)
    scores = (gaussians.queries(x) * gaussians.keys(y)).sum(dim=1)
    assert scores.mean().item() == pytest.approx(1.5, abs=0.03)
    independent = (gaussians.queries(x) * gaussians.keys(y.roll(1, 0))).sum(dim=1)
    assert independent.exp().mean().item() == pytest.approx(1.0, abs=0.15)  # Z


def test_draws_reach_the_threshold_and_are_uniform():
    scores = torch.tensor([[0.0, 1.0, 2.0, 3.0], [9.0, -1.0, -2.0, -3.0]])
    draws = draw_above(scores, 1.0, 3000)
    counts = torch.stack([(draws[0] == value).sum() for value in (1, 2, 3)])
    assert counts.sum() == 3000 and (counts - 1000).abs().max() < 150
    assert (draws[1] == 9).all()
    with pytest.raises(ValueError, match=r"threshold = 4\.0 is not allowed: some rows"):
        draw_above(scores, 4.0, 3)


@pytest.mark.parametrize("information", [1.0, 3.0])
def test_conditional_negatives_bound_and_vary_less(information):
    """Theorems 3.1 and 3.2, ring_sample's draws among the means."""
    estimates = {"all": [], "ball": [], "ring": [], "theorem": []}
    deviations = {name: [] for name in estimates}
    for _ in range(6):
        positives, queries, keys = scores_of(information)
        scores = queries @ keys.T
        sources = {
            "all": lambda queries=queries, keys=keys: ring_sample(queries, keys, 0, 100, num_samples=255),
            "ball": lambda queries=queries, keys=keys: ring_sample(queries, keys, 90, 100, num_samples=255),
            "ring": lambda queries=queries, keys=keys: ring_sample(queries, keys, 90, 99, num_samples=255),
            "theorem": lambda scores=scores: draw_above(scores, 0.0, 255),
        }
        for name, source in sources.items():
            redrawn = [contrastive_information(positives, source()).item() for _ in range(8)]
            estimates[name].append(mean(redrawn))
            deviations[name].append(stdev(redrawn))
    error = stdev(estimates["all"]) / math.sqrt(6)
    assert mean(estimates["all"]) < information + 3 * error
    for name in ("ball", "ring", "theorem"):
        assert all(conditional < plain for conditional, plain in zip(estimates[name], estimates["all"], strict=True))
        assert mean(deviations[name]) < 0.8 * mean(deviations["all"])


def test_a_conditional_distribution_that_does_not_bound():
    """The farther half leaves out nearly all that makes Z: the estimate is beyond I by far more than its error."""
    positives, queries, keys = scores_of(2.0)
    draws = ring_sample(queries, keys, 0, 50, num_samples=255)
    assert draws.exp().mean() < 0.1
    assert contrastive_information(positives, draws) > 2.0 + 2.0


def test_a_ring_bounds_only_as_long_as_its_members_make_up_for_the_closest():
    """At 8 nats nearly all of Z is in the closest hundredth, which the ring 90..99 leaves out."""
    for information, bounds in ((2.0, True), (8.0, False)):
        positives, queries, keys = scores_of(information)
        ring = ring_sample(queries, keys, 90, 99, num_samples=4095)
        everything = ring_sample(queries, keys, 0, 100, num_samples=4095)
        assert (ring.exp().mean() > 1) == bounds
        estimates = [contrastive_information(positives, scores) for scores in (ring, everything)]
        assert (estimates[0] < estimates[1]) == bounds


@pytest.mark.parametrize(
    ("positives", "negatives", "words"),
    [
        ((5,), (4, 7), r"negative_scores has the shape \(4, 7\), positive_scores \(5,\)"),
        ((5, 1), (5, 7), r"positive_scores \(5, 1\)"),
        ((5,), (5,), r"negative_scores has the shape \(5,\)"),
        ((5,), (5, 0), "holds no negatives"),
        ((0,), (0, 3), "holds no pairs"),
    ],
)
def test_errors_of_shapes(positives, negatives, words):
    with pytest.raises(ValueError, match=words):
        contrastive_information(torch.zeros(positives), torch.zeros(negatives))


def test_errors_of_the_distribution():
    for arguments, words in (((0, 1.0), "dim = 0"), ((3, 0.0), r"information = 0\.0"), ((3, math.inf), "= inf")):
        with pytest.raises(ValueError, match=words):
            CorrelatedGaussians(*arguments)


def test_the_critic_of_nearly_equal_coordinates_is_finite():
    pairs = CorrelatedGaussians(dim=1, information=25.0)  # the correlation is 1 in float64
    x, y = pairs.pairs(100, torch.Generator().manual_seed(0))
    assert (pairs.queries(x) * pairs.keys(y)).isfinite().all()


def test_at_least_one_draw():
    with pytest.raises(ValueError, match="num_samples = 0 is not allowed: at least 1"):
        draw_above(torch.ones(2, 3), 0.0, 0)
