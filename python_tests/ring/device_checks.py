"""What each Ring kernel has to do, as checks of a set of kernels: the real ones, and mutants that have to fail.

They are small: in csrc/simt a kernel runs a hundred thousand times slower than on a GPU.
"""

import mmap

import torch
from similarities import boundaries_of_ranks, layouts, make_similarities, members, order_keys
from simt_ring import Kernels
from torch import Tensor

from accuracy import assert_as_accurate


def assert_equal(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], *case) -> None:
    """Bit for bit: NaN equals a NaN."""
    for a, b in zip(got, expected, strict=True):
        if a.is_floating_point():
            a, b = a.view(torch.int32), b.contiguous().view(torch.int32)
        assert torch.equal(a, b), (*case, a, b)


def check_select(kernels: Kernels, kind: str, k: int, layout: str = "contiguous") -> None:
    similarities = make_similarities(kind, 3, k)
    exclude = torch.tensor([-1, 0, k - 1])
    lower, upper = k * 9 // 10, max(k * 99 // 100, 1)
    for ranks in ([lower, upper, lower, max(upper - 1, lower)], [1, k - 1, 1, k - 2], [0, k // 2, k // 2, k - 1]):
        ranks = [min(max(rank, 0), k - (i > 1)) for i, rank in enumerate(ranks)]
        got = kernels.select(layouts(similarities)[layout], ranks, exclude)
        assert_equal(got, boundaries_of_ranks(similarities, ranks, exclude), kind, k, layout, ranks)


def candidates_of(similarities: Tensor, capacity: int, *counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Order keys and indices (N, S, capacity) of each row's first keys, and how many are in which segment: (N, S)."""
    n, segments = len(counts), len(counts[0])
    keys = torch.full((n, segments, capacity), -3, dtype=torch.int32)
    indices = torch.full((n, segments, capacity), -5, dtype=torch.int32)
    for row, of_row in enumerate(counts):
        taken = 0
        for segment, count in enumerate(of_row):
            keys[row, segment, :count] = order_keys(similarities[row, taken : taken + count])
            indices[row, segment, :count] = torch.arange(7 * taken, 7 * (taken + count), 7)
            taken += count
    return keys, indices, torch.tensor(counts, dtype=torch.int32)


def check_select_candidates(kernels: Kernels, kind: str) -> None:
    """Few candidates, many, and a row without any; indices are seven times the position."""
    counts = [300, 0, 17, 1], [0, 0, 0, 0], [700, 700, 1, 650]
    similarities = make_similarities(kind, 3, 2100)
    candidates = candidates_of(similarities, 700, *counts)
    for shares in ((0.0, 0.5), (0.37, 0.81), (0.99, 1.0)):
        ranks = torch.tensor([[int(share * sum(row)) for share in shares] for row in counts])
        thresholds, ties = kernels.select_candidates(*candidates, ranks)
        for row, of_row in enumerate(counts):
            total, pair = sum(of_row), ranks[row].tolist()
            threshold, tie = boundaries_of_ranks(similarities[row : row + 1, :total], [*pair, 0, 0], None)
            above_all = torch.tensor([0 < total == rank for rank in pair])
            expected = threshold[0], torch.where(above_all, 2**63 - 1, 7 * tie[0])
            assert_equal((thresholds[row], ties[row]), expected, kind, row, pair)


def ranks_for(k: int, lower: float, upper: float) -> list[int]:
    return [int(lower * k), int(upper * k), int(lower * (k - 1)), int(upper * (k - 1))]


def check_compact(kernels: Kernels, kind: str, k: int, layout: str = "contiguous") -> None:
    similarities = make_similarities(kind, 2, k)
    # One with all rows, or no row, excluding a key, so that all rings have one size.
    for (lower, upper), exclude in (((0.9, 0.99), None), ((0.0, 1.0), torch.tensor([k // 2, 0])), ((0.3, 1.0), None)):
        ranks = ranks_for(k, lower, upper)
        boundaries = boundaries_of_ranks(similarities, ranks, exclude)
        indices = torch.stack(members(similarities, ranks, exclude))
        got = kernels.compact(layouts(similarities)[layout], *boundaries, exclude, indices.shape[1], True)
        assert_equal(got, (similarities.gather(1, indices), indices), kind, k, layout, ranks)


def check_draw(kernels: Kernels, kind: str, k: int) -> None:
    """Rows with and without an excluded key, so with rings of two sizes."""
    similarities = make_similarities(kind, 3, k)
    exclude = torch.tensor([-1, 5, -1])
    ranks = ranks_for(k, 0.55, 0.95)
    ranks[3] -= 3
    uniform = torch.rand(3, 70, dtype=torch.float64)
    uniform[:, 0], uniform[:, 1] = 0.0, 1 - 2.0**-53
    got = kernels.draw(similarities, *boundaries_of_ranks(similarities, ranks, exclude), exclude, uniform, ranks, True)
    indices = torch.stack(
        [
            of_row[(draws * len(of_row)).long().clamp(max=len(of_row) - 1)]
            for of_row, draws in zip(members(similarities, ranks, exclude), uniform)
        ]
    )
    assert_equal(got, (similarities.gather(1, indices), indices), kind, k)


def check_query_gradient(kernels: Kernels, dtype: torch.dtype, samples: int, channels: int, layout: str) -> None:
    keys = layouts(torch.randn(50, channels).to(dtype))[layout]
    indices = torch.randint(0, 50, (2, samples))
    gradient = torch.randn(2, samples)
    got = kernels.query_gradient(gradient, indices, keys)
    gathered = keys[indices]
    exact = torch.einsum("nm,nmc->nc", gradient.double(), gathered.double())
    plain = torch.einsum("nm,nmc->nc", gradient, gathered.float())
    assert_as_accurate(got, exact, plain)


def check_keys_gradient(kernels: Kernels, dtype: torch.dtype, samples: int, channels: int, skewed: bool) -> None:
    """``skewed``: nearly all draws are of one key, more than a warp is to add up by itself."""
    num_keys, query = 21, torch.randn(3, channels).to(dtype)
    indices = torch.randint(0, num_keys - 2, (3, samples))  # two keys were drawn by nobody
    if skewed:
        indices[torch.rand(3, samples) < 0.98] = 9
    gradient = torch.randn(3, samples)
    got = kernels.keys_gradient(gradient, indices, query, num_keys)

    def sums(dtype):
        parts = gradient.to(dtype)[..., None] * query.to(dtype)[:, None]
        zeros = torch.zeros(num_keys, channels, dtype=dtype)
        return zeros.index_put((indices,), parts, accumulate=True)

    assert_as_accurate(got, sums(torch.float64), sums(torch.float32))
    assert (got[-2:] == 0).all()


def far_apart(elements: int, dtype: torch.dtype) -> Tensor:
    """So many zeros, in memory that the system gives only where it is touched."""
    no_reserve = 0x4000  # Linux; mmap.MAP_NORESERVE since Python 3.13
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)


def check_offsets(kernels: Kernels) -> None:
    """Matrices, results and candidates whose elements lie more than 2^31 elements apart."""
    n, k, far = 2, 260, 2**31 + 16
    ranks, exclude = [100, 200, 100, 200], torch.tensor([-1, 7])
    for strides in ((far, 1), (1, 2**23 + 3)):
        similarities = far_apart(n * strides[0] + k * strides[1], torch.float32).as_strided((n, k), strides)
        similarities.copy_(torch.randn(n, k))
        boundaries = boundaries_of_ranks(similarities, ranks, exclude)
        assert_equal(kernels.select(similarities, ranks, exclude), boundaries, strides)
        indices = torch.stack(members(similarities, ranks, exclude))
        got = kernels.compact(similarities, *boundaries, exclude, 100, True)
        assert_equal(got, (similarities.gather(1, indices), indices), strides)
        uniform = (torch.arange(100.0, dtype=torch.float64) / 100 + 0.005).expand(n, 100)
        got = kernels.draw(similarities, *boundaries, exclude, uniform, ranks, True)
        assert_equal(got, (similarities.gather(1, indices), indices), strides)

    keys = far_apart(2 * far, torch.float32).as_strided((2, 8), (far, 1))
    keys.copy_(torch.randn(2, 8))
    indices = torch.tensor([[0, 1, 1]])
    assert_equal((kernels.query_gradient(torch.ones(1, 3), indices, keys),), ((keys[:1] + keys[1:]) + keys[1:],))

    keys, indices = (far_apart(2 * far, torch.int32).view(2, 2, far // 2) for _ in range(2))
    keys[:, :, :3] = torch.randint(-9, 9, (2, 2, 3))
    indices[:, :, :3] = torch.arange(6).view(2, 3)
    counts, wanted = torch.full((2, 2), 3, dtype=torch.int32), torch.tensor([[1, 4]] * 2)
    thresholds, ties = kernels.select_candidates(keys, indices, counts, wanted)
    for row in range(2):
        order = keys[row, :, :3].flatten().argsort(stable=True)[[1, 4]]
        expected = keys[row, :, :3].flatten()[order], order
        assert_equal((thresholds[row], ties[row]), expected, "candidates", row)


def check_bad_candidates(kernels: Kernels) -> None:
    """A bracket that missed, and counts that are none: any result, but no access out of bounds, and an end."""
    candidates = candidates_of(torch.randn(5, 90), 40, *[[40, 40]] * 5)
    candidates[2][4] = torch.tensor([1000, -1000])
    ranks = torch.tensor([[-5, 3], [70, 200], [60, 20], [-(2**62), 2**62], [-1, 1]])
    thresholds, ties = kernels.select_candidates(*candidates, ranks)
    assert thresholds.shape == ties.shape == (5, 2)


def check_room(kernels: Kernels) -> None:
    """More keys between the boundaries than are asked for: the first of them, and nothing beyond."""
    similarities = torch.randn(2, 300)
    boundaries = boundaries_of_ranks(similarities, [0, 300, 0, 0], None)
    values, indices = kernels.compact(similarities, *boundaries, None, 50, True)
    assert_equal((values, indices), (similarities[:, :50], torch.arange(50).expand(2, 50)))
