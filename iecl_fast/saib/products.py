"""Products of matrices with short sums.

A long sum in float32 rounds more than torch's convolutions do, and torch may share it out among threads, so that its
bits would depend on how many there are.
"""

import torch
from torch import Tensor

_CHANNELS = 128
_POSITIONS = 128
_POSITIONS_OF_FEW = 32  # narrow features have few numbers to sum up: many sums cost little
_FEW = 2048


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b, a sum over channels."""
    total = torch.mm(a[:, :_CHANNELS], b[:_CHANNELS], out=out)
    for begin in range(_CHANNELS, len(b), _CHANNELS):
        total.addmm_(a[:, begin : begin + _CHANNELS], b[begin : begin + _CHANNELS])
    return total


def products(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b of batches of matrices, sums over channels."""
    for begin in range(0, b.shape[1], _CHANNELS):
        pieces = a[:, :, begin : begin + _CHANNELS], b[:, begin : begin + _CHANNELS]
        # beta = 0 ignores what was there.
        torch.baddbmm(out, *pieces, beta=int(begin > 0), out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, a sum over positions."""
    begin = 0
    if total.numel() <= _FEW:
        begin = len(b) // _POSITIONS_OF_FEW * _POSITIONS_OF_FEW
        pieces = a[:, :begin].unflatten(1, (-1, _POSITIONS_OF_FEW)).transpose(0, 1)
        total += torch.bmm(pieces, b[:begin].unflatten(0, (-1, _POSITIONS_OF_FEW))).sum(0)
    for first in range(begin, len(b), _POSITIONS):
        total.addmm_(a[:, first : first + _POSITIONS], b[first : first + _POSITIONS])
