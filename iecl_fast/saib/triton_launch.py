"""Launches of SAIB's Triton kernels: geometry, packed weights, features as rows."""

from contextlib import nullcontext
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from iecl_fast.saib import triton_plan as plan
from iecl_fast.saib.triton_product import product_kernel
from iecl_fast.saib.triton_tail import tail_kernel
from iecl_fast.saib.triton_weights import ordered_sum_kernel, weight_gradient_kernel


class Geometry(NamedTuple):
    """Of one call, see triton_tiles.py. Positions come in ``units`` of ``unit``: strips of patches, or samples."""

    width: int  # D
    extent_a: int
    extent_b: int
    grid_height: int
    grid_width: int
    units: int
    unit: int
    patch_size: int
    channels_are_batch: bool
    precision: str  # of products in float32
    hopper: bool  # see triton_plan.product_tile

    @property
    def positions(self) -> int:
        return self.units * self.unit

    @property
    def cells(self) -> int:
        return self.extent_a * self.extent_b

    def in_kernel(self) -> dict:
        return {"PATCH": self.patch_size, "BATCH": self.channels_are_batch, "PRECISION": self.precision}


def geometry(x: Tensor, patch_size: int, channels_are_batch: bool) -> Geometry:
    """That of images (N, C, H, W)."""
    n, channels, height, width = x.shape
    rows, columns = height // patch_size, width // patch_size
    # tf32 where torch's own products use it
    precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
    if channels_are_batch:
        extents = n, channels * rows * columns, patch_size**2
        units, unit = channels * rows, patch_size * width
    else:
        extents = channels * patch_size**2, rows, columns
        units, unit = n, rows * columns
    # Where there is no GPU, such tensors are fake ones.
    hopper = not (x.is_cuda and torch.cuda.is_available()) or torch.cuda.get_device_capability(x.device) >= (9, 0)
    if units * unit >= 2**31 - 2**16:
        raise ValueError(f"x of shape {tuple(x.shape)} has {units * unit} positions, which is not allowed: below 2^31")
    return Geometry(*extents, rows, columns, units, unit, patch_size, channels_are_batch, precision, hopper)


def is_straight(shape: Geometry, image: Tensor) -> bool:
    """Whether pixels of neighbouring positions are neighbours in memory, in aligned runs of 16."""
    *outer, last = image.stride()
    lines = shape.channels_are_batch and last == 1 and image.shape[3] % 16 == 0
    return lines and all(stride % 16 == 0 for stride in outer)


class Rows(NamedTuple):
    """Features (positions, padded channels) of the positions from ``start`` on, in patch order."""

    values: Tensor
    start: int = 0


def new_rows(shape: Geometry, x: Tensor, width: int, units: int | None = None) -> Tensor:
    """Features of ``width`` times D channels over ``units`` (all if None), with no values."""
    return x.new_empty((shape.units if units is None else units) * shape.unit, plan.padded(width * shape.width))


def pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(outputs, inputs, kh, kw) to (kh * kw, padded outputs, padded inputs); itself if it is that already."""
    outputs, inputs = weight.shape[:2]
    taps = weight.permute(2, 3, 0, 1).reshape(-1, outputs, inputs)
    shape = len(taps), plan.padded(outputs), plan.padded(inputs)
    if shape == taps.shape:
        return taps.to(dtype).contiguous()
    whole = weight.new_zeros(shape, dtype=dtype)
    whole[:, :outputs, :inputs] = taps
    return whole


def on_device_of(tensor: Tensor):
    """Triton launches on the current device; a tensor may be on another."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def product(
    shape: Geometry,
    source: Rows | Tensor,
    weight: Tensor,
    target: Rows | Tensor,
    epilogue: str,
    *,
    transposed: bool = False,
    saved: Rows | None = None,
    skip: Tensor | None = None,
    position: Tensor | None = None,
    columns: Tensor | None = None,
    sums: Tensor | None = None,
    load_activation: str = "none",
    units: tuple[int, int] | None = None,
) -> None:
    """One launch of product_kernel. ``units``: from, to; all if None. Tensors as source or target are images."""
    begin, end = units or (0, shape.units)
    count = (end - begin) * shape.unit
    taps, outputs, inputs = weight.shape
    if transposed:
        outputs, inputs = inputs, outputs
    source_image, target_image = isinstance(source, Tensor), isinstance(target, Tensor)
    images = [one for one in (source, target, skip) if isinstance(one, Tensor)]
    scattered = not all(is_straight(shape, one) for one in images)
    tile = plan.product_tile(weight.element_size(), count, outputs, scattered, shape.hopper)
    image = source if source_image else skip
    source_rows, target_rows = (Rows(one) if isinstance(one, Tensor) else one for one in (source, target))
    saved_rows = saved or Rows(None)
    product_kernel[(ceil(count / tile.block_m) * ceil(outputs / tile.block_n),)](
        source_rows.values,
        weight,
        target_rows.values,
        saved_rows.values,
        skip,
        position,
        columns,
        sums,
        begin * shape.unit,
        count,
        source_rows.start,
        target_rows.start,
        saved_rows.start,
        shape.positions,
        shape.grid_height,
        shape.grid_width,
        shape.extent_a,
        shape.extent_b,
        *(image.stride() if image is not None else (0, 0, 0, 0)),
        *(target.stride() if target_image else (0, 0, 0, 0)),
        D=shape.width,
        K=inputs,
        N=outputs,
        TAPS=taps,
        TRANSPOSED=transposed,
        SOURCE_IMAGE=source_image,
        EPILOGUE=epilogue,
        LOAD_ACTIVATION=load_activation,
        **shape.in_kernel(),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def tail(
    shape: Geometry,
    tile: plan.TailTile,
    source: Tensor,
    weights: list[Tensor],
    second: Tensor | None,
    x: Tensor,
    target: Tensor,
    position: Tensor | None,
    silu: bool,
) -> None:
    """One launch of tail_kernel."""
    tail_kernel[(ceil(shape.positions / tile.block_m),)](
        source,
        *weights,
        second,
        x,
        target,
        position,
        shape.positions,
        shape.grid_height,
        shape.grid_width,
        shape.extent_a,
        shape.extent_b,
        *x.stride(),
        *target.stride(),
        D=shape.width,
        K=weights[0].shape[2],
        N=weights[0].shape[1],
        SILU=silu,
        **shape.in_kernel(),
        BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k,
        BLOCK_T=tile.block_t,
        SLICE=tile.slice,
        SLICES=tile.slices,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


class WeightGradient:
    """Sums of one weight's gradient: ``add`` for each piece of the positions and each use of the weight, in order."""

    def __init__(self, shape: Geometry, weight: Tensor, positions: int, dtype: torch.dtype, from_image: bool):
        """``positions``: how many ``add`` gets at most. ``from_image``: one of the two factors is an image."""
        self.shape, self.weight = shape, weight
        outputs, inputs = plan.padded(weight.shape[0]), plan.padded(weight.shape[1])
        taps = weight.shape[2] * weight.shape[3]
        self.tile = plan.weight_tile(dtype.itemsize, outputs, inputs, from_image, shape.hopper)
        self.splits = plan.weight_splits(dtype.itemsize, positions, taps, outputs, inputs, from_image)
        self.partial = weight.new_empty(self.splits + 1, taps, outputs, inputs, dtype=torch.float32)
        self.used = self.splits
        self.filled = False

    def add(
        self,
        gradient: Rows | Tensor,
        features: Rows | Tensor,
        units: tuple[int, int],
        *,
        gradient_activation: str = "none",
        load_activation: str = "none",
        position: Tensor | None = None,
    ) -> None:
        """gradient^T features over ``units`` (from, to). ``position`` is added to the image ``features``."""
        shape, tile = self.shape, self.tile
        begin, end = units
        count = (end - begin) * shape.unit
        _, taps, outputs, inputs = self.partial.shape
        gradient_image, features_image = isinstance(gradient, Tensor), isinstance(features, Tensor)
        gradient_rows, feature_rows = (Rows(one) if isinstance(one, Tensor) else one for one in (gradient, features))
        image = gradient if gradient_image else features if features_image else None
        programs = ceil(outputs / tile.block_o) * ceil(inputs / tile.block_i) * taps * self.splits
        weight_gradient_kernel[(programs,)](
            gradient_rows.values,
            feature_rows.values,
            self.partial,
            position,
            begin * shape.unit,
            count,
            ceil(count / (self.splits * tile.block_p)) * tile.block_p,
            gradient_rows.start,
            feature_rows.start,
            int(self.filled),
            shape.grid_height,
            shape.grid_width,
            shape.extent_a,
            shape.extent_b,
            *(image.stride() if image is not None else (0, 0, 0, 0)),
            D=shape.width,
            O=outputs,
            K=inputs,
            TAPS=taps,
            GRADIENT_IMAGE=gradient_image,
            FEATURES_IMAGE=features_image,
            GRADIENT_ACTIVATION=gradient_activation,
            LOAD_ACTIVATION=load_activation,
            **shape.in_kernel(),
            BLOCK_O=tile.block_o,
            BLOCK_I=tile.block_i,
            BLOCK_P=tile.block_p,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        self.filled = True

    def add_last(self, matrix: Tensor) -> None:
        """A matrix (padded outputs, padded inputs) of a 1x1, summed after all others."""
        self.partial[self.splits, 0] = matrix
        self.used = self.splits + 1

    def result(self) -> Tensor:
        """In the weight's dtype and memory layout."""
        target = torch.empty_like(self.weight)
        outputs, inputs = target.shape[:2]
        _, taps, padded_outputs, padded_inputs = self.partial.shape
        size, block = taps * outputs * inputs, 256
        ordered_sum_kernel[(ceil(size / block),)](
            self.partial,
            target,
            self.used,
            size,
            outputs,
            inputs,
            *target.stride(),
            TAPS=taps,
            O=padded_outputs,
            K=padded_inputs,
            BLOCK=block,
            num_warps=4,
        )
        return target
