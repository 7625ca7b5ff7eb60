"""Images and weights, and what plain PyTorch makes of them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from iecl_fast.saib import reference, saib


@dataclass(frozen=True)
class Problem:
    channels: str
    shape: tuple[int, int, int, int]
    patch_size: int
    activation: str = "relu"
    expansion: str = "free"
    positional: bool = True

    @property
    def options(self) -> dict:
        return {
            "patch_size": self.patch_size,
            "channels": self.channels,
            "activation": self.activation,
            "expansion": self.expansion,
        }

    @property
    def operator_options(self) -> tuple:
        return self.patch_size, self.channels == "batch", self.activation, self.expansion

    def tensors(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
        """x, position, w1, w2, w3, w4, of one size throughout."""
        n, image_channels, height, width = self.shape
        area = self.patch_size**2
        wide = n if self.channels == "batch" else image_channels * area
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            fan_in = math.prod(shape[1:]) if len(shape) == 4 else 1
            return (torch.randn(shape, generator=generator) * (2 / max(fan_in, 1)) ** 0.5).to(dtype)

        return [
            torch.randn(self.shape, generator=generator).to(dtype),
            draw(image_channels * height * width // area, area) if self.positional else None,
            draw(wide, wide, 1, 1),
            draw(2 * wide, wide, 3, 3),
            draw(2 * wide, 2 * wide, 1, 1),
            draw(wide, 2 * wide, 1, 1) if self.expansion == "free" else None,
        ]

    def ours(self, *tensors: Tensor | None) -> Tensor:
        return saib(*tensors, **self.options)

    def plain(self, *tensors: Tensor | None) -> Tensor:
        return reference.saib(*tensors, *self.operator_options)


def output_and_gradients(function, tensors, dtype=None, gradient=None) -> list[Tensor]:
    """The output, and the gradients of all tensors for a fixed gradient of the output."""
    leaves = [None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    output = function(*leaves)
    if gradient is None:
        gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    gradient = gradient.to(tensors[0].dtype).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, [leaf for leaf in leaves if leaf is not None], gradient)]
