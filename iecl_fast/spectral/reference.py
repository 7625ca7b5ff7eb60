"""The definition of the spectral operators in plain PyTorch, for any device and dtype. Kernels are tested against it.

Miyato et al., "Spectral Normalization for Generative Adversarial Networks", algorithm 1. The same numbers as
``torch.nn.utils.parametrizations.spectral_norm``, but for a weight that v maps to zero, which is passed on as it is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def power_iteration(weight: Tensor, u: Tensor, v: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    """The next singular vectors u (rows,) and v (columns,) of a weight (rows, ...), from the last ones."""
    matrix = weight.detach().flatten(1)
    for _ in range(iterations):
        product = matrix @ v
        if not product.any():
            break  # nothing to be learned: a zero vector would stay zero for ever
        u = F.normalize(product, dim=0, eps=eps)
        v = F.normalize(matrix.T @ u, dim=0, eps=eps)
    return u, v


def spectral_norm(
    weight: Tensor, u: Tensor, v: Tensor, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``weight / sigma``, the new u and v, and sigma, differentiable in weight through sigma = u . W v."""
    u, v = power_iteration(weight, u, v, iterations, eps)
    sigma = u @ (weight.flatten(1) @ v)
    return weight / torch.where(sigma == 0, torch.ones_like(sigma), sigma), u, v, sigma
