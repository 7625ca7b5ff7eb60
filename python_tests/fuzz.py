"""What the fuzz tests draw from: tensors on which kernels go wrong, in values and in memory. With hypothesis.

A tensor's bulk comes from a seed, which is quick and shrinks to 0; only a few of its elements are drawn one by one.
"""

import torch
from hypothesis import strategies as st
from torch import Tensor

torch.set_printoptions(threshold=4, edgeitems=1)  # a failure shows what was drawn

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TAME = ("normal", "unit", "grid", "constant")
KINDS = (*TAME, "zeros", "tiny", "huge", "sorted")


def special_values(dtype: torch.dtype) -> list[float]:
    limits = torch.finfo(dtype)
    subnormal = limits.smallest_normal * limits.eps
    finite = [0.0, 1.0, limits.max, limits.smallest_normal, subnormal, limits.eps]
    return [*finite, *(-value for value in finite), float("inf"), -float("inf"), float("nan")]


@st.composite
def values(
    draw, shape: tuple[int, ...], dtype: torch.dtype, kinds: tuple[str, ...] = KINDS, special: bool = True
) -> Tensor:
    """A contiguous tensor; with ``special`` up to four elements are NaN, infinite, subnormal, the largest, -0 ..."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    kind = draw(st.sampled_from(kinds))
    tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
    limits = torch.finfo(dtype)
    if kind == "unit":
        tensor = torch.nn.functional.normalize(tensor, dim=-1)
    elif kind == "grid":
        tensor = tensor.round()
    elif kind == "constant":
        tensor = torch.full(shape, draw(st.sampled_from([0.25, -1.5, 3.0])), dtype=torch.float64)
    elif kind == "zeros":
        tensor = torch.where(tensor > 0, 0.0, -0.0).double()
    elif kind == "tiny":
        tensor = tensor * limits.smallest_normal / 4
    elif kind == "huge":
        tensor = tensor.clamp(-2, 2) * (limits.max / 4)
    elif kind == "sorted" and tensor.numel():
        tensor = tensor.sort(dim=0).values
    tensor = tensor.to(dtype)
    if special and tensor.numel():
        places = st.tuples(st.integers(0, tensor.numel() - 1), st.sampled_from(special_values(dtype)))
        for place, value in draw(st.lists(places, max_size=4)):
            tensor.view(-1)[place] = value
    return tensor


@st.composite
def laid_out(draw, tensor: Tensor, expand: bool = True) -> Tensor:
    """The tensor in another memory layout: dimensions in any order, gaps that hold NaN, an offset.

    With ``expand`` one dimension may get the stride 0: then all its elements become the first ones.
    """
    if tensor.dim() == 0 or draw(st.booleans()):
        return tensor
    if expand and tensor.numel() and draw(st.integers(0, 3)) == 0:
        dimension = draw(st.integers(0, tensor.dim() - 1))
        small = draw(laid_out(tensor.narrow(dimension, 0, 1), expand=False))
        return small.expand(tensor.shape)
    order = draw(st.permutations(range(tensor.dim())))
    steps = draw(st.lists(st.integers(1, 3), min_size=tensor.dim(), max_size=tensor.dim()))
    offset = draw(st.integers(0, 2))
    sizes = [offset + size * step for size, step in zip(tensor.shape, steps)]
    gap = float("nan") if tensor.is_floating_point() else -(2**14)
    storage = torch.full([sizes[dimension] for dimension in order], gap, dtype=tensor.dtype)
    view = storage.permute([order.index(dimension) for dimension in range(tensor.dim())])
    view = view[tuple(slice(offset, size, step) for size, step in zip(sizes, steps))]
    return view.copy_(tensor)


@st.composite
def tensors(draw, shape, dtype, kinds=KINDS, special=True) -> Tensor:
    return draw(laid_out(draw(values(shape, dtype, kinds, special))))


@st.composite
def percentiles(draw) -> tuple[float, float]:
    """lower < upper in 0..100: whole numbers, decimals, anything that floats hold."""
    number = st.integers(0, 100).map(float) | st.integers(0, 10**5).map(lambda n: n / 1000) | st.floats(0, 100)
    lower, upper = sorted(draw(st.lists(number, min_size=2, max_size=2, unique=True)))
    return abs(lower), upper
