"""The rule for rounding errors: a kernel may be at most twice as wrong as plain PyTorch in the same dtype."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def joined(runs: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    """Several random problems of one shape in one: numbers that plain PyTorch hits by chance are no measure."""
    return [torch.stack(tensors) for tensors in zip(*runs, strict=True)]


def assert_as_accurate(result: Tensor, reference: Tensor, plain: Tensor) -> None:
    """``result`` against ``reference`` (float64), measured by ``plain``, what PyTorch computes in result's dtype.

    The floor is what one addition and subtraction of 0.3 lose in that dtype, so that plain may be exact by chance.
    """
    assert result.shape == reference.shape == plain.shape
    rounded = reference.to(result.dtype)
    floor = ((rounded + 0.3 - 0.3).double() - rounded.double()).abs().max().item()
    error = (result.double() - reference).abs().max().item()
    allowed = 2 * (plain.double() - reference).abs().max().item() + floor
    assert error <= allowed, f"error {error:.3e}, plain PyTorch's {(allowed - floor) / 2:.3e}, floor {floor:.3e}"
