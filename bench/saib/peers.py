"""SAIB and the chain of PyTorch modules that it replaces, forward and backward to all weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iecl_fast import SAIB


@dataclass(frozen=True)
class Case:
    n: int = 64
    size: int = 32
    patch_size: int = 4
    channels: str = "batch"

    def __str__(self) -> str:
        return f"N={self.n}, {self.size} x {self.size}, p={self.patch_size}, channels={self.channels}"

    @property
    def width(self) -> int:
        return self.n if self.channels == "batch" else 3 * self.patch_size**2

    @property
    def operations(self) -> int:
        """Multiplications and additions of the products, forward and backward: 3 times 25 D^2 for each position."""
        grid = (self.size // self.patch_size) ** 2
        positions = 3 * grid * self.patch_size**2 if self.channels == "batch" else self.n * grid
        return 2 * 3 * 25 * self.width**2 * positions

    def images(self, device: str) -> Tensor:
        torch.manual_seed(0)
        return torch.randn(self.n, 3, self.size, self.size, device=device)


CPU_CASES = [Case(n=n, channels=channels) for channels in ("batch", "patch") for n in (64, 256)]
# 224 x 224: seconds for a round on a CPU.
GPU_CASES = CPU_CASES + [Case(n, 224, 16, channels) for channels in ("batch", "patch") for n in (64, 128, 256)]
# Each takes a GPU about a minute to tune.
TUNED_CASES = [Case(256), Case(128, 224, 16), Case(256, 224, 16)]


class Chain(nn.Module):
    """nn.Unfold, four nn.Conv2d, nn.Fold."""

    def __init__(self, case: Case, memory_format: torch.memory_format = torch.contiguous_format):
        super().__init__()
        self.case, self.memory_format = case, memory_format
        p, wide = case.patch_size, case.width
        self.unfold, self.fold = nn.Unfold(p, stride=p), nn.Fold((case.size, case.size), p, stride=p)
        self.position = nn.Parameter(torch.randn(3 * (case.size // p) ** 2, p * p) * 0.02)
        self.convolutions = nn.Sequential(
            nn.Conv2d(wide, wide, 1, bias=False),
            nn.ReLU(),
            nn.Conv2d(wide, 2 * wide, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.Conv2d(2 * wide, 2 * wide, 1, bias=False),
            nn.ReLU(),
            nn.Conv2d(2 * wide, wide, 1, bias=False),
        ).to(memory_format=memory_format)

    def forward(self, x: Tensor) -> Tensor:
        p, area, grid = self.case.patch_size, self.case.patch_size**2, self.case.size // self.case.patch_size
        patches = self.unfold(x).unflatten(1, (3, area)).transpose(2, 3).flatten(1, 2) + self.position
        if self.case.channels == "batch":
            features = patches[None].contiguous(memory_format=self.memory_format)
            branch = self.convolutions(features)[0]
        else:
            features = patches.unflatten(1, (3, grid, grid)).permute(0, 1, 4, 2, 3).flatten(1, 2)
            branch = self.convolutions(features.contiguous(memory_format=self.memory_format))
            branch = branch.unflatten(1, (3, p * p)).permute(0, 1, 3, 4, 2).flatten(1, 3)
        patches = patches + branch
        return x + self.fold(patches.unflatten(1, (3, grid * grid)).transpose(2, 3).flatten(1, 2))


def ours(case: Case) -> nn.Module:
    return SAIB(case.channels, case.n, case.patch_size, case.size)


def channels_last(case: Case) -> nn.Module:
    return Chain(case, torch.channels_last)


def compiled(case: Case) -> nn.Module:
    return torch.compile(Chain(case), mode="max-autotune", dynamic=False)


FORMS = {"iecl_fast": ours, "chain": Chain, "chain, channels last": channels_last}


def with_gradient(form: Callable[[Case], nn.Module], case: Case, device: str = "cpu") -> Callable[[], Tensor]:
    """Forward and backward to position and weights, under bfloat16 autocast on a GPU; returns the output."""
    module, x = form(case).to(device), case.images(device)
    gradient = torch.randn_like(x)
    parameters = list(module.parameters())

    def run() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        # Without the cache of casted weights, which a graph must not keep.
        with torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
            output = module(x)
        output.backward(gradient.to(output.dtype))
        return output.detach()

    return run
