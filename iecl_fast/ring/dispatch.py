"""Which implementation serves a CUDA tensor, decided here and nowhere else.

Triton's kernels run wherever Triton and the device allow; selection, compaction and draws are taken from the CUDA
library where that was built, else from Triton too. Without Triton the PyTorch reference serves.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from iecl_fast import _library
from iecl_fast.ring.percentiles import ring_ranks

_kernels = torch.ops.iecl_fast


def library_missing() -> str | None:
    """Why selection is not done by the CUDA library, if so."""
    if hasattr(_kernels, "_ring_select"):
        return None
    return "no CUDA library" if _library.cuda_missing is not None else "the CUDA library was built before it had one"


def describe() -> dict[str, str]:
    """For ``iecl-fast doctor``: what each operator uses on this machine's first CUDA device, or would use on one."""
    missing = _library.triton_missing(torch.device("cuda"))
    if missing is not None:
        return dict.fromkeys(("ring_sample", "ring_info_nce"), f"PyTorch reference: {missing}")
    missing = library_missing()
    selection = "selection in CUDA C++" if missing is None else f"selection in Triton: {missing}"
    return {
        "ring_sample": f"product by cuBLAS (float32) or Triton (16-bit), {selection}",
        "ring_info_nce": f"Triton passes, {selection}",
    }


def triton_kernels():
    """The kernels of which there are two kinds (plans.Kernels), those of Triton."""
    from iecl_fast.ring import plans, triton_gradients, triton_select

    return plans.Kernels(
        triton_select.select,
        triton_select.select_candidates,
        triton_select.compact,
        triton_select.draw,
        triton_gradients.sample_query_gradient,
        triton_gradients.sample_keys_gradient,
    )


@cache
def selection_kernels():
    """The same, from the CUDA library if it is there."""
    from iecl_fast.ring import plans

    if library_missing() is not None:
        return triton_kernels()
    return plans.Kernels(
        _kernels._ring_select,
        _kernels._ring_select_candidates,
        _kernels._ring_compact,
        _kernels._ring_draw,
        _kernels._ring_sample_query_gradient_cuda,
        _kernels._ring_sample_keys_gradient_cuda,
    )


def ranks_of_shapes(lower: float, upper: float, num_keys: int, exclude: Tensor | None, one_size: bool) -> list[int]:
    """Ranks of the ring among all keys, and among the others for rows that exclude one, without looking at those.

    What ``exclude`` holds is checked on the device, later (torch._assert_async), also that no row is without one
    where the number of keys kept depends on it: if ``one_size``, or if a ring of all keys would be empty.

    Raises:
        ValueError: as ring_ranks, for the ranks of rows that exclude a key, or without exclude for those of all.
    """
    if exclude is None:
        return [*ring_ranks(lower, upper, num_keys), 0, 0]
    first_of_rest, end_of_rest = ring_ranks(lower, upper, num_keys - 1)
    try:
        first, end = ring_ranks(lower, upper, num_keys)
    except ValueError:
        first, end = 0, 0
    needs_own = end == first or (one_size and end - first != end_of_rest - first_of_rest)
    smallest = 0 if needs_own else -1
    torch._assert_async(
        ((exclude >= smallest) & (exclude < num_keys)).all(),
        f"exclude contains what is not allowed: key indices {smallest}..{num_keys - 1} are allowed"
        + (", -1 is not, since another number of keys would be kept for it" if needs_own else " (-1 for none)"),
    )
    return [first, end, first_of_rest, end_of_rest]


def with_plans(reference: dict[str, Callable]) -> dict[str, Callable]:
    """Implementations of the operators by kernels; by ``reference`` (name to function) on devices without."""

    def sample(query, keys, lower, upper, exclude, uniform, with_indices):
        from iecl_fast.ring import plans

        ranks = ranks_of_shapes(lower, upper, keys.shape[0], exclude, one_size=uniform is None)
        return plans.sample(query, keys, ranks, _contiguous(exclude), uniform, with_indices, selection_kernels())

    def query_gradient(gradient, indices, keys):
        return selection_kernels().sample_query_gradient(gradient, indices, keys)

    def keys_gradient(gradient, indices, query, num_keys):
        return selection_kernels().sample_keys_gradient(gradient, indices, query, num_keys)

    def info_nce(query, positive_key, keys, temperature, lower, upper, exclude, with_gradient):
        from iecl_fast.ring import plans

        ranks = ranks_of_shapes(lower, upper, keys.shape[0], exclude, one_size=False)
        return plans.info_nce(
            query, positive_key, keys, temperature, ranks, _contiguous(exclude), with_gradient, selection_kernels()
        )

    def info_nce_keys_gradient(query, keys, temperature, lower, upper, exclude, log_denominator, loss_gradient):
        from iecl_fast.ring import plans

        ranks = ranks_of_shapes(lower, upper, keys.shape[0], exclude, one_size=False)
        return plans.info_nce_keys_gradient(
            query,
            keys,
            temperature,
            ranks,
            _contiguous(exclude),
            log_denominator,
            loss_gradient.contiguous(),
            selection_kernels(),
        )

    def where_possible(kernel: Callable, fallback: Callable) -> Callable:
        def implementation(first: Tensor, *args):
            if _library.triton_missing(first.device) is not None:
                return fallback(first, *args)
            # Triton launches on the current device, whatever the tensors' is.
            with torch.cuda.device_of(first), torch.autocast(first.device.type, enabled=False):
                return kernel(first, *args)

        return implementation

    kernels = {
        "ring_sample": sample,
        "ring_sample_query_gradient": query_gradient,
        "ring_sample_keys_gradient": keys_gradient,
        "ring_info_nce": info_nce,
        "ring_info_nce_keys_gradient": info_nce_keys_gradient,
    }
    return {name: where_possible(kernel, reference[name]) for name, kernel in kernels.items()}


def _contiguous(exclude: Tensor | None) -> Tensor | None:
    """The kernels read ``exclude`` as an array; a slice or an expanded index is none."""
    return None if exclude is None else exclude.contiguous()
