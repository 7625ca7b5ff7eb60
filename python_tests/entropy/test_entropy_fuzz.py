"""Any features: estimators of entropy and of mutual information against formulas written out in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuzz import DTYPES, TAME, tensors, values
from iecl_fast.entropy import effective_rank, gaussian_entropy, gaussian_kl, knn_entropy, uniformity
from iecl_fast.mutual_information import CorrelatedGaussians, contrastive_information, draw_above

KINDS = (*TAME, "zeros", "sorted")
ESTIMATORS = {
    "gaussian": gaussian_entropy,
    "neighbours": lambda rows: knn_entropy(rows, k=1),
    "uniformity": uniformity,
    "rank": effective_rank,
    "divergence": lambda rows: gaussian_kl(rows, rows.flip(0) * 0.5),
    "diagonal": lambda rows: gaussian_kl(rows, rows.flip(0) * 0.5, variance="diagonal"),
}


@st.composite
def features(draw, dtype=torch.float64, kinds=KINDS, special=False, columns=None):
    shape = draw(st.integers(2, 12)), draw(st.integers(1, 10)) if columns is None else columns
    return draw(tensors(shape, dtype, kinds, special))


def log_det(matrix):
    sign, value = torch.linalg.slogdet(matrix)
    assert sign > 0
    return value


def moments(rows, floor):
    mean = rows.mean(0)
    centred = rows - mean
    return mean, centred.T @ centred / (len(rows) - 1) + floor * torch.eye(rows.shape[1], dtype=rows.dtype)


def close(got, exact, scale=1.0):
    assert got.dtype == torch.float64
    assert abs(float(got) - float(exact)) <= 1e-8 * (1 + abs(float(exact)) + scale)


@given(features(), st.sampled_from([1e-3, 0.1, 2.0]))
def test_gaussian_entropy(rows, floor):
    _, covariance = moments(rows, floor)
    exact = 0.5 * (log_det(covariance) + rows.shape[1] * math.log(2 * math.pi * math.e))
    close(gaussian_entropy(rows, noise_floor=floor), exact)


@given(st.data(), st.sampled_from([1e-3, 0.1, 2.0]), st.sampled_from(["full", "diagonal", 0.5]))
def test_gaussian_kl(data, floor, variance):
    p = data.draw(features())
    q = data.draw(features(columns=p.shape[1]))
    (mp, sp), (mq, sq) = moments(p, floor), moments(q, floor)
    d = p.shape[1]
    if variance == "diagonal":
        sp, sq = torch.diag(sp.diagonal()), torch.diag(sq.diagonal())
    elif variance != "full":
        sp = sq = variance * torch.eye(d, dtype=torch.float64)
    shift = mq - mp
    inverse = torch.linalg.inv(sq)
    exact = 0.5 * ((inverse @ sp).trace() + shift @ inverse @ shift - d + log_det(sq) - log_det(sp))
    got = gaussian_kl(p, q, variance=variance, noise_floor=floor)
    close(got, exact, d / floor)
    assert got > -1e-8 * (1 + d / floor)


@given(features(), st.integers(1, 4))
def test_neighbours_and_uniformity(rows, k):
    n, d = rows.shape
    distances = (rows[:, None] - rows[None]).square().sum(-1).sqrt()
    others = distances[~torch.eye(n, dtype=torch.bool)].view(n, n - 1)
    close(uniformity(rows), (-2 * others.square()).exp().mean().log(), float(rows.square().sum(1).max()))
    if n <= k:
        with pytest.raises(ValueError, match="features has"):
            knn_entropy(rows, k=k)
        return
    nearest = others.sort(dim=1).values[:, k - 1].clamp_min(1e-6)
    volume = 0.5 * d * math.log(math.pi) - math.lgamma(0.5 * d + 1)
    counts = torch.digamma(torch.tensor([n, k], dtype=torch.float64))
    close(knn_entropy(rows, k=k), counts[0] - counts[1] + volume + d * nearest.log().mean(), d)


@given(features())
def test_effective_rank(rows):
    got = float(effective_rank(rows))
    assert got == 0 or 1 - 1e-9 <= got <= min(len(rows) - 1, rows.shape[1]) + 1e-6
    values = torch.linalg.svdvals(rows - rows.mean(0))
    if values.sum() > 1e-6:
        shares = values / values.sum()
        exact = math.exp(-sum(share * math.log(share) for share in shares.tolist() if share > 0))
        assert math.isclose(got, exact, rel_tol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(data=st.data())
def test_no_values_are_too_much(name, data):
    """Nothing finite of what is not, never an error; half precision is that of float32."""
    dtype = data.draw(st.sampled_from(DTYPES))
    rows = data.draw(features(dtype, (*KINDS, "tiny", "huge"), special=True))
    result = ESTIMATORS[name](rows)
    assert result.dtype == torch.float32 and result.shape == ()
    again = ESTIMATORS[name](rows.float().contiguous())
    torch.testing.assert_close(result, again, equal_nan=True, rtol=1e-3, atol=1e-3)
    if not rows.isfinite().all():
        assert not result.isfinite()


@given(st.data())
def test_contrastive_information(data):
    n, m = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 20))
    positives, negatives = (data.draw(tensors(shape, torch.float64, KINDS, special=False)) for shape in ((n,), (n, m)))
    scores = torch.cat([positives[:, None], negatives], 1).tolist()
    exact = 0.0
    for positive, *rest in scores:
        largest = max(positive, *rest)
        total = sum(math.exp(score - largest) for score in (positive, *rest))
        exact += (positive - largest - math.log(total / (m + 1))) / n
    got = float(contrastive_information(positives, negatives))
    largest = max(abs(score) for row in scores for score in row)
    assert not abs(got - exact) > 1e-12 * (1 + largest)
    assert got <= math.log(m + 1) + 1e-9


@given(st.data())
def test_draws_are_above_the_threshold(data):
    scores = data.draw(values((data.draw(st.integers(1, 6)), data.draw(st.integers(1, 20))), torch.float32))
    threshold = data.draw(st.sampled_from([-1.0, 0.0, 0.5]))
    if not (scores >= threshold).any(1).all():
        with pytest.raises(ValueError, match="threshold"):
            draw_above(scores, threshold, 5)
        return
    draws = draw_above(scores, threshold, 5, torch.Generator().manual_seed(0))
    assert draws.shape == (len(scores), 5) and (draws >= threshold).all()
    assert all(torch.isin(row, own).all() for row, own in zip(draws, scores))


@given(st.integers(1, 9), st.floats(1e-3, 8), st.integers(0, 99))
def test_the_critic_is_the_ratio_of_densities(dim, information, seed):
    gaussians = CorrelatedGaussians(dim, information)
    generator = torch.Generator().manual_seed(seed)
    x, y = (part.double() for part in gaussians.pairs(5, generator))
    r = gaussians.correlation
    assert math.isclose(-0.5 * dim * math.log1p(-(r**2)), information, rel_tol=1e-6)
    conditional = -0.5 * ((y - r * x).square() / (1 - r**2) - y.square() + math.log1p(-(r**2))).sum(1)
    scores = (gaussians.queries(x) * gaussians.keys(y)).sum(1)
    torch.testing.assert_close(scores, conditional, rtol=1e-6, atol=1e-6 / (1 - r**2))
