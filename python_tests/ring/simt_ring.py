"""The CUDA kernels of csrc/ring on the host: as functions of tensors, and as CPU implementations of their operators."""

from functools import cache
from pathlib import Path

import torch
from simt_build import build_simt_module
from torch import Tensor

import iecl_fast  # noqa: F401  (loads the libraries, and with them the schemas that were built)

HERE = Path(__file__).parent
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# As in csrc/library_cuda.cu, for machines where that was not built.
SCHEMAS = """
_ring_select(Tensor similarities, int[] ranks, Tensor? exclude) -> (Tensor thresholds, Tensor ties)
_ring_select_candidates(Tensor keys, Tensor indices, Tensor counts, Tensor ranks) -> (Tensor thresholds, Tensor ties)
_ring_compact(Tensor similarities, Tensor thresholds, Tensor ties, Tensor? exclude, int size, bool with_indices) \
-> (Tensor similarities, Tensor indices)
_ring_draw(Tensor similarities, Tensor thresholds, Tensor ties, Tensor? exclude, Tensor uniform, int[] ranks, \
bool with_indices) -> (Tensor similarities, Tensor indices)
_ring_sample_query_gradient_cuda(Tensor gradient, Tensor indices, Tensor keys) -> Tensor
_ring_sample_keys_gradient_cuda(Tensor gradient, Tensor indices, Tensor query, int num_keys) -> Tensor
"""


def build(name: str, **changes):
    return build_simt_module(
        name, HERE / "kernels.cpp", HERE / "bindings.cpp", options=(f"-DSIMT_RING={name}",), **changes
    )


@cache
def module():
    return build("simt_ring")


class Kernels:
    """The operators' functions over a module of kernels: the real one, or one of mutants.

    ``splits``: how many blocks share a row, if not what the kernels' own function of the shape says.
    """

    def __init__(self, simt, splits: int | None = None):
        self.simt, self.splits = simt, splits

    def splits_of(self, rows: int, keys: int) -> int:
        return self.simt.splits_of(rows, keys) if self.splits is None else self.splits

    def select(self, similarities: Tensor, ranks: list[int], exclude: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, keys = similarities.shape
        thresholds = torch.full((rows, 2), -7, dtype=torch.int32)
        ties = torch.full((rows, 2), -7, dtype=torch.int64)
        storage, layout = _in_memory(similarities)
        self.simt.select(
            storage, layout, ranks, _optional(exclude), self.splits_of(rows, keys), thresholds.numpy(), ties.numpy()
        )
        return thresholds, ties

    def select_candidates(self, keys: Tensor, indices: Tensor, counts: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor]:
        rows, segments, capacity = keys.shape
        thresholds = torch.full((rows, 2), -7, dtype=torch.int32)
        ties = torch.full((rows, 2), -7, dtype=torch.int64)
        arrays = [tensor.contiguous().numpy() for tensor in (keys, indices, counts)]
        self.simt.select_candidates(
            *arrays, segments, capacity, ranks.contiguous().numpy(), thresholds.numpy(), ties.numpy()
        )
        return thresholds, ties

    def compact(self, similarities, thresholds, ties, exclude, size: int, with_indices: bool) -> tuple[Tensor, Tensor]:
        rows, keys = similarities.shape
        values, indices = _results(rows, size, with_indices)
        self.simt.compact(
            *_in_memory(similarities),
            thresholds.numpy(),
            ties.numpy(),
            _optional(exclude),
            size,
            self.splits_of(rows, keys),
            values.numpy(),
            _optional(indices if with_indices else None),
        )
        return values, indices

    def draw(
        self, similarities, thresholds, ties, exclude, uniform, ranks: list[int], with_indices: bool
    ) -> tuple[Tensor, Tensor]:
        rows, keys = similarities.shape
        values, indices = _results(rows, uniform.shape[1], with_indices)
        self.simt.draw(
            *_in_memory(similarities),
            thresholds.numpy(),
            ties.numpy(),
            ranks,
            _optional(exclude),
            uniform.contiguous().numpy(),
            uniform.shape[1],
            self.splits_of(rows, keys),
            values.numpy(),
            _optional(indices if with_indices else None),
        )
        return values, indices

    def query_gradient(self, gradient: Tensor, indices: Tensor, keys: Tensor) -> Tensor:
        rows, samples = indices.shape
        result = torch.full((rows, keys.shape[1]), torch.nan)
        self.simt.query_gradient(
            gradient.contiguous().numpy(),
            indices.contiguous().numpy(),
            rows,
            samples,
            *_in_memory(keys),
            DTYPES.index(keys.dtype),
            result.numpy(),
        )
        return result

    def keys_gradient(self, gradient: Tensor, indices: Tensor, query: Tensor, num_keys: int) -> Tensor:
        result = torch.full((num_keys, query.shape[1]), torch.nan)
        in_order, order = indices.flatten().sort(stable=True)
        self.simt.keys_gradient(
            gradient.contiguous().numpy(),
            in_order.numpy(),
            order.numpy(),
            indices.shape[1],
            *_in_memory(query),
            DTYPES.index(query.dtype),
            num_keys,
            result.numpy(),
        )
        return result


@cache
def register_on_cpu() -> torch.library.Library:
    """Lets ``torch.ops.iecl_fast._ring_select`` and its like run on CPU tensors, for the rest of the process."""
    kernels = Kernels(module())
    library = torch.library.Library("iecl_fast", "FRAGMENT")
    functions = (
        kernels.select,
        kernels.select_candidates,
        kernels.compact,
        kernels.draw,
        kernels.query_gradient,
        kernels.keys_gradient,
    )
    for schema, function in zip(SCHEMAS.strip().splitlines(), functions, strict=True):
        name = schema.split("(")[0]
        if not hasattr(torch.ops.iecl_fast, name):
            library.define(schema)
        library.impl(name, function, "CPU")
    return library


def _in_memory(matrix: Tensor):
    """A matrix's whole storage as an array, and (offset, sizes, strides) in it."""
    size = matrix.untyped_storage().nbytes() // matrix.element_size()
    storage = matrix.detach().as_strided((size,), (1,), 0)
    if storage.dtype != torch.float32:
        storage = storage.view(torch.int16)
    return storage.numpy(), (matrix.storage_offset(), *matrix.shape, *matrix.stride())


def _results(rows: int, columns: int, with_indices: bool) -> tuple[Tensor, Tensor]:
    values = torch.full((rows, columns), torch.nan)
    return values, torch.full((rows if with_indices else 0, columns), -7, dtype=torch.int64)


def _optional(tensor: Tensor | None):
    return None if tensor is None else tensor.contiguous().numpy()
