"""Entropy of a batch of features, and its divergence from another batch: the terms of IE-CL beside the contrast.

All functions take one row for each sample, work in float32 (float64 for float64 features) whatever autocast says, and
are differentiable. They estimate *differential* entropies, in nats: they depend on the features' scale and may be
negative. A result is not finite where features are not, and NaN where a covariance is singular, or nearly, but for its
noise floor, and this is less than what rounding takes from the covariance: ``2 sqrt(d) eps`` of its largest variance.

What to know of Zhang et al., "Maximizing Incremental Information Entropy for Contrastive Learning" (2026): its equation
16 adds the entropy to a loss that is minimised, which would lower it, and measures the divergence from the anchors'
Gaussian without the trace of the covariance, which rewards spread without end. Here :func:`gaussian_entropy` is the
entropy itself, to be subtracted from a loss, and :func:`gaussian_kl` is the whole divergence.
"""

import math

import torch
from torch import Tensor

LOG_TAU = math.log(2 * math.pi)


def gaussian_entropy(features: Tensor, *, noise_floor: float = 1e-4) -> Tensor:
    """Entropy of the Gaussian with the features' covariance S and a little noise: ``logdet(2 pi e (S + v I)) / 2``.

    Of all distributions with that covariance the Gaussian's entropy is the greatest, so this bounds the true one from
    above (Cover and Thomas, "Elements of Information Theory", theorem 8.6.5). The noise of variance v keeps it finite
    where features lie in a subspace, as fewer rows than dimensions always do; it also bounds the gradient.

    The determinant is taken on the smaller side: of the d x d covariance, or for N < d of the N x N matrix of inner
    products, whose eigenvalues other than 0 are the same (Sylvester's determinant identity).

    Args:
        features: (N, d) floating point, N >= 2, d >= 1.
        noise_floor: v, in the square of the features' unit.

    Returns:
        Scalar, in nats for all d dimensions together.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    rows = _rows(features, "features", least=2)
    _check_positive(noise_floor, "noise_floor")
    n, d = rows.shape
    with torch.autocast(rows.device.type, enabled=False):
        centred = (rows - rows.mean(dim=0)) / math.sqrt(n - 1)
        smaller = centred.T @ centred if d <= n else centred @ centred.T
        log_det = _log_det(smaller, noise_floor) + max(0, d - n) * math.log(noise_floor)
        return 0.5 * (log_det + d * (LOG_TAU + 1))


def knn_entropy(features: Tensor, *, k: int = 3, least_distance: float = 1e-6) -> Tensor:
    """Entropy by distances to the k-th nearest neighbour, of any distribution.

    ``digamma(N) - digamma(k) + log(volume of the unit d-ball) + d/N * sum_i log(distance of i to its k-th neighbour)``:
    Kozachenko and Leonenko 1987; in this form Kraskov et al. 2004, "Estimating Mutual Information", equation 20. Its
    bias shrinks slowly in many dimensions, where only its gradient is of use: neighbours are pushed apart.

    Args:
        features: (N, d) floating point, N > k, d >= 1.
        k: which neighbour; more neighbours, less variance and more bias.
        least_distance: shorter distances count as this one and give no gradient, so that equal rows stay finite.

    Returns:
        Scalar, in nats for all d dimensions together.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    if k < 1:
        raise ValueError(f"k = {k} is not allowed: at least 1")
    rows = _rows(features, "features", least=k + 1)
    _check_positive(least_distance, "least_distance")
    n, d = rows.shape
    with torch.autocast(rows.device.type, enabled=False):
        with torch.no_grad():
            distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
            distances.fill_diagonal_(torch.inf)
            neighbours = distances.kthvalue(k, dim=1).indices
        nearest = torch.linalg.vector_norm(rows - rows[neighbours], dim=1).clamp_min(least_distance)
        log_volume = 0.5 * d * math.log(math.pi) - math.lgamma(0.5 * d + 1)
        counts = torch.digamma(torch.tensor([n, k], dtype=torch.float64))
        return (counts[0] - counts[1]).item() + log_volume + d * nearest.log().mean()


def uniformity(features: Tensor, *, t: float = 2.0) -> Tensor:
    """How evenly unit rows lie on the sphere: ``log(mean over pairs of exp(-t |x - y|^2))``; lower is more even.

    Wang and Isola 2020, "Understanding Contrastive Representation Learning through Alignment and Uniformity on the
    Hypersphere", section 4.1.2. Up to a constant its negative is a kernel estimate of the entropy (of Renyi's kind,
    order 2): 0 when all rows are the same, towards ``-2 t`` in many dimensions.

    Args:
        features: (N, d) floating point, N >= 2; the formula is meant for rows of length 1.
        t: > 0, how local.

    Returns:
        Scalar <= 0.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    rows = _rows(features, "features", least=2)
    _check_positive(t, "t")
    n = len(rows)
    with torch.autocast(rows.device.type, enabled=False):
        norms = rows.square().sum(dim=1)
        squares = (norms[:, None] + norms - 2 * (rows @ rows.T)).clamp_min(0)
        itself = torch.eye(n, dtype=torch.bool, device=rows.device)
        exponents = (-t * squares).masked_fill(itself, -torch.inf)
        result = torch.logsumexp(exponents.flatten(), dim=0) - math.log(n * (n - 1))
        return torch.where(rows.isfinite().all(), result, torch.nan)  # else a row at infinity is just far from others


def gaussian_kl(
    features: Tensor, other: Tensor, *, variance: str | float = "full", noise_floor: float = 1e-4
) -> Tensor:
    """Divergence KL(p || q) of the Gaussian p that fits ``features`` from the Gaussian q that fits ``other``.

    ``(trace(Sq^-1 Sp) + (mq - mp)' Sq^-1 (mq - mp) - d + logdet Sq - logdet Sp) / 2`` with means m and covariances S,
    each S with noise of variance v added (Kullback, "Information Theory and Statistics", chapter 9). It is never
    negative, and 0 only for equal means and covariances. Without the trace it would have no lower bound.

    Args:
        features: (N, d) floating point, N >= 2.
        other: (M, d), M >= 2, same d and device; dtypes are promoted.
        variance: ``"full"`` covariance matrices; ``"diagonal"``, each dimension on its own, which is the better
            conditioned choice where rows are not many times more than dimensions; or a positive number, the variance
            of both in every dimension, for which the divergence is ``|mp - mq|^2 / (2 variance)``.
        noise_floor: v, in the square of the features' unit; not added to a variance given as a number.

    Returns:
        Scalar, in nats for all d dimensions together.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    p, q = _rows(features, "features", least=2), _rows(other, "other", least=2)
    if p.shape[1] != q.shape[1]:
        raise ValueError(f"other has {q.shape[1]} columns; as many as features are allowed, {p.shape[1]}")
    dtype = torch.promote_types(p.dtype, q.dtype)
    p, q = p.to(dtype), q.to(dtype)
    _check_positive(noise_floor, "noise_floor")
    if isinstance(variance, str):
        if variance not in ("full", "diagonal"):
            raise ValueError(f"variance = {variance!r} is not allowed: 'full', 'diagonal' or a positive number")
    else:
        _check_positive(variance, "variance")
    with torch.autocast(p.device.type, enabled=False):
        shift = q.mean(dim=0) - p.mean(dim=0)
        if variance == "full":
            return _full_kl(p, q, shift, noise_floor)
        if variance == "diagonal":
            own, wanted = p.var(dim=0) + noise_floor, q.var(dim=0) + noise_floor
            return 0.5 * ((own + shift.square()) / wanted - 1 + wanted.log() - own.log()).sum()
        return 0.5 * shift.square().sum() / variance


def _full_kl(p: Tensor, q: Tensor, shift: Tensor, noise_floor: float) -> Tensor:
    # cov() of a single column has no dimension.
    own, wanted = (_cholesky(rows.T.cov().view(rows.shape[1], -1), noise_floor) for rows in (p, q))
    # |Lq^-1 Lp|^2 is the trace, and needs no inverse.
    trace = torch.linalg.solve_triangular(wanted, own, upper=False).square().sum()
    distance = torch.linalg.solve_triangular(wanted, shift[:, None], upper=False).square().sum()
    log_ratio = 2 * (wanted.diagonal().log().sum() - own.diagonal().log().sum())
    return 0.5 * (trace + distance - p.shape[1] + log_ratio)


def effective_rank(features: Tensor) -> Tensor:
    """How many dimensions the features fill: ``exp(-sum_i p_i log p_i)``, p the singular values over their sum.

    Roy and Vetterli 2007, "The Effective Rank: A Measure of Effective Dimensionality", of the centred features: from 1
    for a line to min(N - 1, d), and 0 for rows that are all the same. A collapse of the representation shows in it.

    Args:
        features: (N, d) floating point, N >= 2.

    Returns:
        Scalar.
    """
    rows = _rows(features, "features", least=2)
    with torch.autocast(rows.device.type, enabled=False):
        finite = rows.isfinite().all()
        rows = torch.where(finite, rows, 0.0)  # svdvals raises on others
        largest = rows.detach().abs().max()
        rows = rows / torch.where(largest > 0, largest, 1.0)  # the rank has no scale, float32's squares have a range
        values = torch.linalg.svdvals(rows - rows.mean(dim=0))
        total = values.sum()
        # The rounding errors of a large mean are no spread.
        rounding = torch.finfo(rows.dtype).eps * torch.linalg.vector_norm(rows)
        nothing = total <= 4 * math.sqrt(min(rows.shape)) * rounding
        shares = values / torch.where(nothing, torch.ones_like(total), total)
        shares = torch.where(shares > 0, shares, 1.0)  # both have the entropy 0, but 1 has a slope
        rank = torch.where(nothing, torch.zeros_like(total), torch.special.entr(shares).sum().exp())
        return torch.where(finite, rank, torch.nan)


def _log_det(matrix: Tensor, noise_floor: float) -> Tensor:
    """logdet(matrix + noise_floor * I) of a positive semi-definite matrix."""
    return 2 * _cholesky(matrix, noise_floor).diagonal().log().sum()


def _cholesky(matrix: Tensor, noise_floor: float) -> Tensor:
    """The lower factor of matrix + noise_floor * I; NaN where there is none, or rounding errors stand in for the noise.

    A squared pivot is what the rows before leave of its diagonal entry. Where little is left, and the noise is less
    than what was rounded away, it could be anything. Without looking for errors a GPU need not be waited for.
    """
    noise = noise_floor * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    factor, info = torch.linalg.cholesky_ex(matrix + noise)
    rounding = 2 * math.sqrt(len(matrix)) * torch.finfo(matrix.dtype).eps
    diagonal = matrix.detach().diagonal() + noise_floor
    left = factor.detach().diagonal().square() / diagonal
    lost = (noise_floor < rounding * diagonal.max()) & (left.min() < 500 * rounding)
    return torch.where((info == 0) & ~lost, factor, torch.nan)


def _rows(features: Tensor, name: str, *, least: int) -> Tensor:
    """The features in float32 or float64."""
    if features.dim() != 2 or features.shape[1] == 0 or not features.is_floating_point():
        what = f"{features.dtype} of shape {tuple(features.shape)}"
        raise ValueError(f"{name} is {what}; a floating-point matrix is allowed, a row for each sample")
    if len(features) < least:
        raise ValueError(f"{name} has {len(features)} rows; at least {least} are allowed")
    return features.to(torch.promote_types(features.dtype, torch.float32))


def _check_positive(value: float, name: str) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} = {value} is not allowed: a positive number")
