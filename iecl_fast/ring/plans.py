"""How a Ring operator is put together from kernels on a CUDA device: what runs, in which order, for which rows.

Nothing here waits for the device or allocates by what tensors hold, and the number of launches depends on shapes alone:
everything captures into a CUDA graph.

Plan B' (plan_recompute) forms the similarities anew in each pass.

Plan C: write the similarities of some rows, find the ring's boundaries in them, read them again for what the ring's
members are wanted for. All passes read the same written numbers, so they agree on who is a member whatever rounded
them. Rows go in chunks, so the buffer stays bounded however long the queue is.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from iecl_fast.ring import plan_recompute, tiles, triton_gradients, triton_info_nce, triton_select

BUFFER_BYTES = 256 * 2**20  # of what exists for the rows of a chunk; of one row's at least
# Similarities of all rows that plan C may write; what would be more is formed anew.
WRITTEN_BYTES = 256 * 2**20


def recomputes(query: Tensor, keys: Tensor, ranks: list[int]) -> bool:
    """Whether InfoNCE takes plan B'.

    The reasons are a model, nothing was timed. Without a selection one pass does everything, so there is nothing to
    write for. With one, plan B' forms the similarities three times and pays about 43, 68 and 80 instructions for each
    in the compiled loops of its passes (sm_90, 128 channels), where plan C pays 16 bytes or more of traffic and the
    last pass: while its buffer holds all rows, plan C is expected to be the quicker. Beyond, plan B' needs less memory
    and reads the keys fewer times. In float32 a product takes many times as long, so it is never done again, and more
    channels than one tile holds cannot be.
    """
    (rows, channels), num_keys = query.shape, keys.shape[0]
    if query.dtype == torch.float32 or channels > tiles.RECOMPUTED_CHANNELS:
        return False
    return ranks[:2] == [0, num_keys] or 4 * rows * num_keys > WRITTEN_BYTES


class Kernels(NamedTuple):
    """Kernels that are there in CUDA C++ and in Triton; see triton_select and triton_gradients for what they do."""

    select: Callable
    select_candidates: Callable
    compact: Callable
    draw: Callable
    sample_query_gradient: Callable
    sample_keys_gradient: Callable


def precision(dtype: torch.dtype) -> str:
    """Of Triton's products; those of float32 follow torch's setting, those of 16-bit numbers have but one."""
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"


class _Chunk(NamedTuple):
    """Some rows, their similarities (n, K) float32 and their boundaries."""

    rows: slice
    similarities: Tensor
    thresholds: Tensor
    ties: Tensor
    exclude: Tensor | None


def _chunks(
    query: Tensor, keys: Tensor, ranks: list[int], exclude: Tensor | None, select: Callable
) -> Iterator[_Chunk]:
    """The chunks of plan C; each is overwritten by the next."""
    rows, num_keys = query.shape[0], keys.shape[0]
    size = max(1, min(rows, BUFFER_BYTES // (4 * num_keys)))
    buffer = query.new_empty((size, num_keys), dtype=torch.float32)
    for first in range(0, rows, size):
        chunk = slice(first, min(first + size, rows))
        similarities = buffer[: chunk.stop - first]
        _write_similarities(query[chunk], keys, similarities)
        own = None if exclude is None else exclude[chunk]
        yield _Chunk(chunk, similarities, *_boundaries(similarities, ranks, own, select), own)


def _write_similarities(query: Tensor, keys: Tensor, similarities: Tensor) -> None:
    # cuBLAS follows torch's setting for float32 exactly. It would copy a queue without a channel or a key next to each
    # other, and it has no product of 16-bit numbers into a given float32 tensor.
    if query.dtype == torch.float32 and 1 in keys.stride():
        torch.mm(query, keys.T, out=similarities)
    else:
        triton_info_nce.write_similarities(query, keys, similarities, precision(query.dtype))


def _boundaries(
    similarities: Tensor, ranks: list[int], exclude: Tensor | None, select: Callable
) -> tuple[Tensor, Tensor]:
    num_keys = similarities.shape[1]
    if ranks[:2] == [0, num_keys]:  # plain InfoNCE: nothing has to be found
        return triton_select.whole_order(similarities, num_keys)
    return select(similarities, ranks, exclude)


def sample(
    query: Tensor,
    keys: Tensor,
    ranks: list[int],
    exclude: Tensor | None,
    uniform: Tensor | None,
    with_indices: bool,
    kernels: Kernels,
) -> tuple[Tensor, Tensor]:
    """Similarities (N, M) float32 and indices int64 (N, M), or (0, M), as the operator ring_sample has them."""
    # The rows that exclude a key tell, if any may; dispatch has seen to it that all have as many.
    count = uniform.shape[1] if uniform is not None else ranks[1] - ranks[0] if exclude is None else ranks[3] - ranks[2]
    rows = query.shape[0]
    values = query.new_empty((rows, count), dtype=torch.float32)
    indices = query.new_empty((rows if with_indices else 0, count), dtype=torch.int64)
    for chunk in _chunks(query, keys, ranks, exclude, kernels.select):
        ring = chunk.similarities, chunk.thresholds, chunk.ties, chunk.exclude
        if uniform is None:
            part = kernels.compact(*ring, count, with_indices)
        else:
            part = kernels.draw(*ring, uniform[chunk.rows], ranks, with_indices)
        values[chunk.rows] = part[0]
        if with_indices:
            indices[chunk.rows] = part[1]
    return values, indices


def info_nce(
    query: Tensor,
    positive_key: Tensor,
    keys: Tensor,
    temperature: Tensor,
    ranks: list[int],
    exclude: Tensor | None,
    with_gradient: bool,
    kernels: Kernels,
) -> tuple[Tensor, Tensor, Tensor]:
    """loss (N,) float32, log_denominator (N,) float64, query_gradient (N, C) or (0, C) float32."""
    rows, channels = query.shape
    loss = query.new_empty(rows, dtype=torch.float32)
    log_denominator = query.new_empty(rows, dtype=torch.float64)
    query_gradient = query.new_empty((rows if with_gradient else 0, channels), dtype=torch.float32)
    if recomputes(query, keys, ranks):
        size = max(1, BUFFER_BYTES // plan_recompute.bytes_of_row(keys.shape[0], channels))
        for first in range(0, rows, size):
            part = slice(first, min(first + size, rows))
            plan_recompute.info_nce(
                query[part],
                positive_key[part],
                keys,
                temperature,
                ranks,
                None if exclude is None else exclude[part],
                kernels.select,
                kernels.select_candidates,
                loss[part],
                log_denominator[part],
                query_gradient[part],
            )
        return loss, log_denominator, query_gradient
    for chunk in _chunks(query, keys, ranks, exclude, kernels.select):
        part = chunk.rows
        triton_info_nce.weigh(
            chunk.similarities,
            query[part],
            positive_key[part],
            keys,
            temperature,
            chunk.thresholds,
            chunk.ties,
            chunk.exclude,
            precision(query.dtype),
            loss[part],
            log_denominator[part],
            query_gradient[part],
        )
    return loss, log_denominator, query_gradient


def info_nce_keys_gradient(
    query: Tensor,
    keys: Tensor,
    temperature: Tensor,
    ranks: list[int],
    exclude: Tensor | None,
    log_denominator: Tensor,
    loss_gradient: Tensor,
    kernels: Kernels,
) -> Tensor:
    """(K, C) float32, the boundaries found again."""
    gradient = keys.new_zeros(keys.shape, dtype=torch.float32)
    for chunk in _chunks(query, keys, ranks, exclude, kernels.select):
        part = chunk.rows
        triton_gradients.add_keys_gradient(
            chunk.similarities,
            query[part],
            temperature,
            chunk.thresholds,
            chunk.ties,
            chunk.exclude,
            log_denominator[part],
            loss_gradient[part],
            gradient,
            precision(query.dtype),
        )
    return gradient
