"""Entropies and divergences against closed forms, scipy, and gradients in float64."""

import math

import pytest
import torch
from scipy import stats

from accuracy import assert_as_accurate
from iecl_fast.entropy import effective_rank, gaussian_entropy, gaussian_kl, knn_entropy, uniformity

TINY = 1e-12  # a noise floor that float64 does not notice beside a variance of about 1


def mixing(d, seed=0):
    """A well conditioned matrix (d, d); x @ mixing has its Gram matrix as covariance when x is standard normal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.eye(d, dtype=torch.float64) + 0.3 * torch.randn(d, d, generator=generator, dtype=torch.float64)


def normal(n, d, seed=1):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def true_entropy(covariance):
    return float(stats.multivariate_normal(cov=covariance.numpy()).entropy())


@pytest.mark.parametrize(("n", "d"), [(40, 5), (5, 5), (6, 5), (5, 40), (2, 1), (2, 9)])
@pytest.mark.parametrize("noise_floor", [1e-3, 0.5])
def test_gaussian_entropy_is_that_of_the_empirical_covariance(n, d, noise_floor):
    rows = normal(n, d) @ mixing(d) + 3
    covariance = rows.T.cov().reshape(d, d) + noise_floor * torch.eye(d, dtype=torch.float64)
    expected = true_entropy(covariance)
    assert gaussian_entropy(rows, noise_floor=noise_floor).item() == pytest.approx(expected, rel=1e-9)


def test_gaussian_entropy_approaches_that_of_the_distribution():
    matrix = mixing(6)
    expected = true_entropy(matrix.T @ matrix)
    errors = [
        torch.stack([gaussian_entropy(normal(n, 6, seed) @ matrix, noise_floor=TINY) - expected for seed in range(20)])
        for n in (30, 300, 3000)
    ]
    sizes = [error.abs().mean().item() for error in errors]
    assert sizes[0] > 2 * sizes[1] > 4 * sizes[2]
    assert sizes[2] < 0.05


@pytest.mark.parametrize(("n", "d"), [(64, 16), (16, 64)])
def test_gaussian_entropy_in_float32_is_as_accurate_as_torchs_determinant(n, d):
    ours, plain, exact = [], [], []
    for seed in range(8):
        rows = normal(n, d, seed).float()
        covariance = rows.T.cov() + 1e-2 * torch.eye(d)
        ours.append(gaussian_entropy(rows, noise_floor=1e-2))
        plain.append(0.5 * torch.logdet(2 * math.pi * math.e * covariance))
        exact.append(gaussian_entropy(rows.double(), noise_floor=1e-2))
    assert_as_accurate(torch.stack(ours), torch.stack(exact), torch.stack(plain))


def test_gaussian_entropy_of_rows_that_are_all_the_same_is_the_noises():
    rows = torch.full((8, 3), 0.7, requires_grad=True)
    entropy = gaussian_entropy(rows, noise_floor=0.01)
    assert entropy.item() == pytest.approx(1.5 * math.log(2 * math.pi * math.e * 0.01), rel=1e-5)
    entropy.backward()
    assert torch.equal(rows.grad, torch.zeros(8, 3))


@pytest.mark.parametrize("k", [1, 3])
def test_knn_entropy_of_a_line_is_scipys_spacing_of_neighbours(k):
    points = normal(400, 1)
    distances = (points - points.T).abs().fill_diagonal_(math.inf).sort(dim=1).values[:, k - 1]
    expected = (torch.digamma(torch.tensor(400.0)) - torch.digamma(torch.tensor(float(k)))).double()
    expected = expected + math.log(2) + distances.log().mean()
    assert knn_entropy(points, k=k).item() == pytest.approx(expected.item(), rel=1e-6)
    assert knn_entropy(points, k=k).item() == pytest.approx(float(stats.norm().entropy()), abs=0.15)


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda n, seed: normal(n, 2, seed) @ mixing(2), true_entropy(mixing(2).T @ mixing(2))),
        # No Gaussian: two uniform squares far apart, each of area 1, half of the rows in each.
        (
            lambda n, seed: (
                torch.rand(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
                + 50.0 * (torch.arange(n) % 2)[:, None]
            ),
            math.log(2),
        ),
    ],
)
def test_knn_entropy_approaches_the_true_one(draw, expected):
    sizes = []
    for n in (50, 1600):
        errors = torch.stack([knn_entropy(draw(n, seed)) - expected for seed in range(12)])
        sizes.append(errors.abs().mean().item())
    assert sizes[1] < 0.5 * sizes[0]
    assert sizes[1] < 0.06
    # ... which the Gaussian one can not: it bounds from above.
    assert gaussian_entropy(draw(1600, 0), noise_floor=TINY) > expected - 0.1


def test_knn_entropy_of_equal_rows_is_finite():
    rows = torch.zeros(6, 4, requires_grad=True)
    knn_entropy(rows).backward()
    assert torch.equal(rows.grad, torch.zeros(6, 4))


@pytest.mark.parametrize("t", [2.0, 0.5])
def test_uniformity_is_its_definition(t):
    rows = torch.nn.functional.normalize(normal(30, 7), dim=1)
    expected = torch.pdist(rows).square().mul(-t).exp().mean().log()
    assert uniformity(rows, t=t).item() == pytest.approx(expected.item(), rel=1e-12)


def test_uniformity_orders_collapsed_and_even_rows():
    generator = torch.Generator().manual_seed(0)
    even = torch.nn.functional.normalize(torch.randn(200, 256, generator=generator), dim=1)
    assert uniformity(torch.ones(5, 4) / 2).item() == pytest.approx(0, abs=1e-6)
    assert uniformity(even).item() == pytest.approx(-4.0, abs=0.1)


@pytest.mark.parametrize("variance", ["full", "diagonal"])
def test_kl_of_known_gaussians(variance):
    """Against torch.distributions, given the same means and covariances."""
    p, q = normal(50, 4, 1) @ mixing(4, 1) + 0.5, normal(70, 4, 2) @ mixing(4, 2)
    noise = 0.01 * torch.eye(4, dtype=torch.float64)
    covariances = [rows.T.cov() + noise for rows in (p, q)]
    if variance == "diagonal":
        covariances = [covariance.diagonal().diag() for covariance in covariances]
    own, other = (
        torch.distributions.MultivariateNormal(rows.mean(dim=0), covariance)
        for rows, covariance in zip((p, q), covariances)
    )
    expected = torch.distributions.kl_divergence(own, other).item()
    assert gaussian_kl(p, q, variance=variance, noise_floor=0.01).item() == pytest.approx(expected, rel=1e-9)
    assert expected > 0.1


def test_kl_with_a_fixed_variance_is_the_squared_distance_of_the_means():
    p, q = normal(9, 3, 1), normal(7, 3, 2)
    expected = (p.mean(dim=0) - q.mean(dim=0)).square().sum().item() / (2 * 0.25)
    assert gaussian_kl(p, q, variance=0.25).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("variance", ["full", "diagonal", 2.0])
@pytest.mark.parametrize(("n", "d"), [(60, 3), (4, 12)])
def test_kl_is_never_negative_and_zero_only_for_equals(variance, n, d):
    p = normal(n, d, 1)
    assert gaussian_kl(p, p[torch.randperm(n)], variance=variance).item() == pytest.approx(0, abs=1e-9)
    others = (3 * p, p / 3, p + 1, normal(n, d, 2))
    divergences = [gaussian_kl(p, other, variance=variance).item() for other in others]
    assert min(divergences) > -1e-9
    assert divergences[2] > 0.1
    if variance != 2.0:
        assert min(divergences) > 0.1  # a form without the trace would reward the wider one


def test_kl_shrinks_with_more_samples_of_one_distribution():
    sizes = [gaussian_kl(normal(n, 5, 1), normal(n, 5, 2)).item() for n in (20, 200, 2000)]
    assert sizes[0] > 4 * sizes[1] > 16 * sizes[2]


def test_effective_rank_counts_dimensions():
    rows = torch.zeros(9, 6)
    rows[1:5, :4] = torch.eye(4)
    rows[5:9, :4] = -torch.eye(4)
    assert effective_rank(rows).item() == pytest.approx(4, rel=1e-5)
    assert effective_rank(rows[:, :1].contiguous()).item() == pytest.approx(1, rel=1e-5)
    assert effective_rank(torch.full((16, 8), 0.3)).item() == 0
    assert 1 < effective_rank(torch.tensor([[0.0, 0], [1, 0], [0, 0.1]])) < 2


GRADIENTS = {
    "gaussian": lambda rows: gaussian_entropy(rows, noise_floor=0.1),
    "knn": lambda rows: knn_entropy(rows, k=2),
    "uniformity": uniformity,
    "kl of features": lambda rows: gaussian_kl(rows, normal(6, rows.shape[1], 5), noise_floor=0.1),
    "kl of other": lambda rows: gaussian_kl(normal(6, rows.shape[1], 5), rows, noise_floor=0.1),
    "diagonal kl": lambda rows: gaussian_kl(normal(6, rows.shape[1], 5), rows, variance="diagonal"),
    "fixed kl": lambda rows: gaussian_kl(normal(6, rows.shape[1], 5), rows, variance=0.5),
    "effective rank": effective_rank,
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize(("n", "d"), [(7, 3), (5, 8)])
def test_gradients(name, n, d):
    assert torch.autograd.gradcheck(GRADIENTS[name], normal(n, d, 3).requires_grad_())


@pytest.mark.parametrize(
    "function", [gaussian_entropy, knn_entropy, uniformity, effective_rank, lambda rows: gaussian_kl(rows, rows[:4])]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_half_precision_features_are_computed_in_float32(function, dtype):
    rows = normal(8, 6, 3).to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        result = function(rows)
    assert result.dtype == torch.float32
    assert torch.equal(result, function(rows.float()))


def test_features_that_are_not_finite_give_nan():
    rows = normal(8, 4)
    rows[2, 1] = math.inf
    assert gaussian_entropy(rows).isnan()
    assert gaussian_kl(rows, normal(8, 4, 2)).isnan()
    assert effective_rank(rows).isnan()
    assert uniformity(rows).isnan()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gaussian_entropy(torch.zeros(1, 3)), "features has 1 rows; at least 2 are allowed"),
        (lambda: gaussian_entropy(torch.zeros(3)), r"features is torch\.float32 of shape \(3,\)"),
        (lambda: gaussian_entropy(torch.zeros(3, 2, dtype=torch.int64)), r"features is torch\.int64"),
        (lambda: gaussian_entropy(torch.zeros(3, 2), noise_floor=0.0), "noise_floor = 0.0 is not allowed"),
        (lambda: knn_entropy(torch.zeros(3, 2)), "features has 3 rows; at least 4 are allowed"),
        (lambda: knn_entropy(torch.zeros(3, 2), k=0), "k = 0 is not allowed"),
        (lambda: uniformity(torch.zeros(3, 2), t=-1.0), "t = -1.0 is not allowed"),
        (lambda: gaussian_kl(torch.zeros(3, 2), torch.zeros(3, 4)), "other has 4 columns; as many as features"),
        (lambda: gaussian_kl(torch.zeros(3, 2), torch.zeros(1, 2)), "other has 1 rows"),
        (lambda: gaussian_kl(torch.zeros(3, 2), torch.zeros(3, 2), variance="batch"), "variance = 'batch'"),
        (lambda: gaussian_kl(torch.zeros(3, 2), torch.zeros(3, 2), variance=-1.0), "variance = -1.0"),
        (lambda: effective_rank(torch.zeros(0, 2)), "features has 0 rows"),
    ],
)
def test_errors(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(("n", "d"), [(5, 5), (3, 16), (40, 8)])
def test_noise_that_rounding_swallows_gives_nan_and_no_number(n, d):
    features = 1000 * torch.randn(n, 2) @ torch.randn(2, d)
    assert gaussian_entropy(features).isnan()
    assert gaussian_kl(features, features + 1).isnan()
    assert gaussian_entropy(features.double()).isfinite()  # which has the digits
    assert gaussian_entropy(1000 * torch.randn(100, d)).isfinite()  # needs no noise


@pytest.mark.parametrize("variance", ["full", "diagonal", 0.5])
def test_kl_of_two_dtypes_is_that_of_the_wider(variance):
    features, other = torch.randn(20, 3, dtype=torch.float64), torch.randn(30, 3)
    expected = gaussian_kl(features, other.double(), variance=variance)
    assert torch.equal(gaussian_kl(features, other, variance=variance), expected)
    expected = gaussian_kl(other.double(), features, variance=variance)
    assert torch.equal(gaussian_kl(other, features, variance=variance), expected)


def test_knn_entropy_of_equal_rows_is_finite_at_any_least_distance():
    assert knn_entropy(torch.ones(5, 3), k=1, least_distance=1e-30).isfinite()


@pytest.mark.parametrize("scale", [1e-30, 1e20])
def test_effective_rank_has_no_scale(scale):
    features = torch.randn(8, 3)
    torch.testing.assert_close(effective_rank(scale * features), effective_rank(features))


def test_effective_rank_of_equal_rows_has_a_gradient():
    features = torch.ones(6, 4, requires_grad=True)
    effective_rank(features).backward()
    assert features.grad.isfinite().all()
