"""log|det J| of a map of images onto images, exact or by stochastic Lanczos quadrature."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT_DIMENSIONS = 2048  # up to here the Jacobian is formed: 32 MiB for each, and one backward pass for each dimension


@dataclass(frozen=True)
class LogAbsDetJacobian:
    """log|det J| in nats per dimension, () for a whole batch or (N,) for each image: the change of entropy.

    Attributes:
        whole: of the map as it is.
        without_scale: less log 2 for each block, which X' = 2 X + ... adds as mere scale.
        standard_error: of both, over the probes; 0 if exact.
        dimensions: that one figure covers: log|det J| itself is ``whole * dimensions``.
        exact: whether the Jacobian was formed.
    """

    whole: Tensor
    without_scale: Tensor
    standard_error: Tensor
    dimensions: int
    exact: bool


def log_abs_det_jacobian(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    num_blocks: int,
    per_image: bool,
    exact: bool | None,
    num_probes: int,
    num_steps: int,
    generator: torch.Generator | None,
) -> LogAbsDetJacobian:
    """Of ``function`` at x (N, C, H, W); with ``per_image`` no image has an influence on another."""
    dimensions = x[0].numel() if per_image else x.numel()
    if exact is None:
        exact = dimensions <= EXACT_DIMENSIONS
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = function(x)
        if exact:
            samples = _slogdet(x, y, per_image)[None]
        else:
            samples = _quadrature(x, y, per_image, num_probes, num_steps, generator)
    samples = samples / dimensions
    whole = samples.mean(0)
    error = torch.zeros_like(whole) if exact else samples.std(0) / math.sqrt(len(samples))
    return LogAbsDetJacobian(whole, whole - num_blocks * math.log(2), error, dimensions, exact)


def _slogdet(x: Tensor, y: Tensor, per_image: bool) -> Tensor:
    size = x[0].numel() if per_image else x.numel()
    rows = []
    for unit in torch.eye(size, dtype=x.dtype, device=x.device):
        direction = unit.view(x.shape[1:]).expand_as(x) if per_image else unit.view(x.shape)
        rows.append(torch.autograd.grad(y, x, direction, retain_graph=True)[0].flatten(1 if per_image else 0))
    return torch.linalg.slogdet(torch.stack(rows, dim=-2))[1]


def _quadrature(x, y, per_image, num_probes, num_steps, generator) -> Tensor:
    """Estimates of log|det J| = 1/2 tr log(J^T J), one for each probe: (probes,) or (probes, N).

    Ubaru, Chen and Saad, "Fast Estimation of tr(f(A)) via Stochastic Lanczos Quadrature". Lanczos' method without
    reorthogonalisation: what it loses are copies of eigenvalues, which share one weight.
    """
    # The gradient is linear in the direction, so differentiating it by the direction multiplies by J.
    direction = torch.zeros_like(y, requires_grad=True)
    (linear,) = torch.autograd.grad(y, x, direction, create_graph=True)

    def multiply(vector: Tensor) -> Tensor:
        """J^T J vector."""
        (product,) = torch.autograd.grad(linear, direction, vector, retain_graph=True)
        return torch.autograd.grad(y, x, product, retain_graph=True)[0]

    def inner(a: Tensor, b: Tensor) -> Tensor:
        product = (a * b).flatten(1).sum(1)
        return product if per_image else product.sum()

    def scaled(factor: Tensor, vector: Tensor) -> Tensor:
        return factor.view(-1, 1, 1, 1) * vector

    estimates = []
    for _ in range(num_probes):
        signs = torch.randint(0, 2, x.shape, generator=generator, device=x.device)
        vector = (2 * signs - 1).to(x.dtype)
        length = inner(vector, vector).sqrt()
        vector, previous = scaled(1 / length, vector), torch.zeros_like(vector)
        beta = torch.zeros_like(length)
        diagonal, beside = [], []
        for _ in range(num_steps):
            product = multiply(vector) - scaled(beta, previous)
            alpha = inner(product, vector)
            product = product - scaled(alpha, vector)
            beta = inner(product, product).sqrt()
            # The space is exhausted: go on with zeros, which have no weight in the quadrature.
            beta = torch.where(beta > alpha.abs() * 100 * torch.finfo(x.dtype).eps, beta, 0)
            previous, vector = vector, scaled(torch.where(beta > 0, 1 / beta, 0), product)
            diagonal.append(alpha)
            beside.append(beta)
        estimates.append(length**2 / 2 * _quadratic_form_of_log(torch.stack(diagonal, -1), torch.stack(beside, -1)))
    return torch.stack(estimates)


def _quadratic_form_of_log(diagonal: Tensor, beside: Tensor) -> Tensor:
    """The first entry of log T of tridiagonal matrices T: (..., steps) each to (...)."""
    tridiagonal = torch.diag_embed(diagonal) + sum(torch.diag_embed(beside[..., :-1], offset) for offset in (1, -1))
    values, vectors = torch.linalg.eigh(tridiagonal.double())
    weights = vectors[..., 0, :] ** 2
    # J^T J has no negative eigenvalues; where rounding made one of those that have no weight, its logarithm is none.
    logarithms = torch.where(weights > 0, values.clamp(min=torch.finfo(torch.float64).tiny).log(), 0)
    return (weights * logarithms).sum(-1)
