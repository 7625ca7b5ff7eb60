"""What a contrastive loss says about mutual information, with negatives from anywhere or from a ring.

For pairs (x, y) from p(x, y) and a critic f, the estimate from m negatives y_1 .. y_m of each x is

    mean of  f(x, y) - log( (e^f(x, y) + sum_j e^f(x, y_j)) / (m + 1) ),

that is log(m + 1) less the contrastive loss. With negatives from p(y) it is InfoNCE (van den Oord et al. 2018), whose
expectation is at most I(X; Y), whatever f. With negatives from p(y) restricted to a set S(x) it is CNCE (Wu et al.,
"Conditional Negative Sampling for Contrastive Learning of Visual Representations", section 3).

When CNCE is a bound, too (Theorem 3.1): if e^f >= Z(x) = E_p(y)[e^f(x, y)] on all of S(x). Then, given the pair, the
logarithm is at least log((e^f(x, y) + m Z) / (m + 1)), and by Jensen's inequality that of InfoNCE is at most that in
expectation. So CNCE <= InfoNCE <= I. Where S leaves out what makes Z large, the inequality may turn round, and the
estimate may exceed I: a ring without its closest keys can do that, far negatives do it always.

Theorem 3.2: if the variance of e^f is no larger on S than under p, CNCE has more bias than InfoNCE and less variance.
``python -m bench.mutual_information`` measures all of it; ``docs/mutual_information.md`` says what came out.
"""

import math

import torch
from torch import Tensor


def contrastive_information(positive_scores: Tensor, negative_scores: Tensor) -> Tensor:
    """The estimate in nats, at most log(m + 1): InfoNCE or CNCE, as the negatives were drawn.

    Args:
        positive_scores: (N,), f(x, y) of the pairs.
        negative_scores: (N, m), f(x, y_j) of each pair's negatives.

    Returns:
        Scalar in the scores' dtype; differentiable.

    Raises:
        ValueError: the shapes do not fit, or there is no pair or no negative.
    """
    if positive_scores.dim() != 1 or negative_scores.shape[:-1] != positive_scores.shape:
        raise ValueError(
            f"negative_scores has the shape {tuple(negative_scores.shape)}, positive_scores "
            f"{tuple(positive_scores.shape)}; (N, m) and (N,) are allowed"
        )
    if len(positive_scores) == 0:
        raise ValueError("positive_scores holds no pairs; at least one is allowed")
    if negative_scores.shape[1] == 0:
        raise ValueError("negative_scores holds no negatives; at least one for each pair is allowed")
    scores = torch.cat([positive_scores[:, None], negative_scores], dim=1)
    return (positive_scores - scores.logsumexp(dim=1)).mean() + math.log(scores.shape[1])


def draw_above(scores: Tensor, threshold: float, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Scores drawn, uniformly and with replacement, from those of each row that reach a threshold.

    This is Theorem 3.1's own choice of negatives if the threshold is log Z; a ring cuts by rank in its place.

    Args:
        scores: (N, K), of each x with K candidates from p(y).
        threshold: least score.
        num_samples: m draws for each row.

    Returns:
        (N, m).

    Raises:
        ValueError: no candidate of some row reaches the threshold, or no samples are asked for.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples = {num_samples} is not allowed: at least 1")
    above = scores >= threshold
    if not above.any(dim=1).all():
        raise ValueError(f"threshold = {threshold} is not allowed: some rows hold no such score; take more candidates")
    return scores.gather(1, above.float().multinomial(num_samples, replacement=True, generator=generator))


class CorrelatedGaussians:
    """Pairs of standard normal vectors, each coordinate of x correlated with that of y: all is known about them.

    The best critic, f(x, y) = log p(y | x) / p(y), for which Z(x) = 1, is a dot product of features. So
    :func:`iecl_fast.ring_sample` finds rings of y around an x as it finds those of keys around a query.

    Args:
        dim: coordinates of x and of y.
        information: I(X; Y) in nats.

    Attributes:
        correlation: of a coordinate of x with that of y: sqrt(1 - exp(-2 I / dim)).
    """

    def __init__(self, dim: int, information: float):
        if dim < 1:
            raise ValueError(f"dim = {dim} is not allowed: at least 1")
        if not 0 < information < math.inf:
            raise ValueError(f"information = {information} is not allowed: a positive number of nats")
        self.dim = dim
        self.information = information
        self.correlation = math.sqrt(-math.expm1(-2 * information / dim))

    def pairs(self, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """x and y (n, dim), float32."""
        x, noise = torch.randn(2, n, self.dim, generator=generator)
        return x, self.correlation * x + math.exp(-self.information / self.dim) * noise

    def queries(self, x: Tensor) -> Tensor:
        """Features (N, dim + 2) of x: ``f(x, y) = queries(x) . keys(y)``."""
        precision = math.exp(2 * self.information / self.dim)
        own = self.information - 0.5 * self.correlation**2 * precision * x.square().sum(dim=1, keepdim=True)
        return torch.cat([self.correlation * precision * x, torch.ones_like(own), own], dim=1)

    def keys(self, y: Tensor) -> Tensor:
        """Features (N, dim + 2) of y."""
        precision = math.exp(2 * self.information / self.dim)
        own = -0.5 * self.correlation**2 * precision * y.square().sum(dim=1, keepdim=True)
        return torch.cat([y, own, torch.ones_like(own)], dim=1)
