"""Problems for SAIB's Triton kernels, and what the reference makes of them."""

from typing import NamedTuple

import torch
from torch import Tensor

from accuracy import assert_as_accurate
from iecl_fast.saib import reference

NAMES = ("x", "position", "w1", "w2", "w3", "w4")


class Case(NamedTuple):
    shape: tuple[int, int, int, int]
    patch_size: int
    channels_are_batch: bool
    dtype: torch.dtype = torch.float32
    activation: str = "relu"
    expansion: str = "free"
    positional: bool = True
    layout: str = "contiguous"  # of x and of the gradient: "channels_last", "transposed", "sliced"

    @property
    def options(self):
        return self.patch_size, self.channels_are_batch, self.activation, self.expansion

    @property
    def width(self) -> int:
        return self.shape[0] if self.channels_are_batch else self.shape[1] * self.patch_size**2


def laid_out(image: Tensor, layout: str) -> Tensor:
    """The same numbers, elsewhere in memory."""
    if layout == "channels_last":
        return image.contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        return image.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "sliced":
        n, channels, height, width = image.shape
        larger = torch.full((n, channels + 1, height, 2 * width), torch.nan, dtype=image.dtype)
        larger[:, 1:, :, ::2] = image
        return larger[:, 1:, :, ::2]
    return image


def problem(case: Case, seed: int = 0) -> tuple[list[Tensor | None], Tensor]:
    """x, position, w1, w2, w3, w4 and a gradient of the output.

    In 16 bits ReLU's gradient of a sum near 0 is a matter of luck, and so would be the test. There all of the forward
    pass is in small integers, about four to a sum, which every dtype has: the errors left are those of the products.
    """
    generator = torch.Generator().manual_seed(seed)
    integers = case.dtype != torch.float32 and case.activation == "relu"

    def numbers(*shape):
        if integers:
            return torch.randint(-1, 2, shape, generator=generator).to(case.dtype)
        return torch.randn(*shape, generator=generator).to(case.dtype)

    def weight(outputs, inputs, side):
        shape, fan_in = (outputs, inputs, side, side), inputs * side * side
        if integers:
            return numbers(*shape) * (torch.rand(*shape, generator=generator) < 6 / fan_in)
        return numbers(*shape) * (2 / fan_in) ** 0.5

    _, channels, height, width = case.shape
    p, d = case.patch_size, case.width
    x = laid_out(numbers(*case.shape), case.layout)
    gradient = laid_out(torch.randn(*case.shape, generator=generator).to(case.dtype), case.layout)
    position = numbers(channels * (height // p) * (width // p), p * p) if case.positional else None
    w4 = weight(d, 2 * d, 1) if case.expansion == "free" else None
    return [x, position, weight(d, d, 1), weight(2 * d, d, 3), weight(2 * d, 2 * d, 1), w4], gradient


def by_reference(case: Case, tensors, gradient, dtype) -> dict[str, Tensor]:
    """Output and gradients, computed in ``dtype``."""
    leaves = {name: own.to(dtype).requires_grad_() for name, own in zip(NAMES, tensors) if own is not None}
    output = reference.saib(*(leaves.get(name) for name in NAMES), *case.options)
    slopes = torch.autograd.grad(output, list(leaves.values()), gradient.to(dtype))
    return {"output": output.detach(), **dict(zip(leaves, slopes))}


def by_module(module, case: Case, tensors, gradient) -> dict[str, Tensor]:
    """The same by a module with ``forward`` and ``backward``."""
    output, saved = module.forward(*tensors, *case.options, True)
    needs = [own is not None for own in tensors]
    slopes = module.backward(gradient, *tensors, saved, *case.options, needs)
    return {"output": output, **dict(zip((name for name, needed in zip(NAMES, needs) if needed), slopes, strict=True))}


def assert_accurate(results: dict[str, Tensor], case: Case, tensors, gradient) -> None:
    """The 2x rule for the results that are there."""
    truth = by_reference(case, tensors, gradient, torch.float64)
    plain = by_reference(case, tensors, gradient, case.dtype)
    for name, result in results.items():
        try:
            assert_as_accurate(result, truth[name], plain[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
