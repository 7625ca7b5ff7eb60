"""``python -m bench.ring.roofline``: what the GPU kernels of Ring have to move beside what they do move.

No GPU is needed: the CUDA kernels run on the host by csrc/simt, which counts what every thread loads and stores, and
roofline_triton reads the machine code of the Triton kernels. A GPU makes one access of what a warp loads from one
place, so the figures are upper bounds.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from bench.ring.roofline_rows import Row, table

_TESTS = Path(__file__).parents[2] / "python_tests"
sys.path += [str(_TESTS), str(_TESTS / "ring")]  # simt_ring builds and calls the kernels, launched_plans records them


def cuda_rows(n: int = 2, k: int = 65536, c: int = 128, samples: int = 1024) -> list[Row]:
    """The CUDA kernels, for the ring 90..99 of similarities of unit vectors."""
    import simt_ring
    from similarities import boundaries_of_ranks, make_similarities, members, order_keys
    from simt_ring import Kernels

    simt, kernels = simt_ring.module(), Kernels(simt_ring.module())
    rows: list[Row] = []

    def measure(
        call: Callable, name: str, shape: str, needed: float, allowed: float, operations: str = "", expected: int = 0
    ) -> None:
        simt.take_counters()
        call()
        counters = simt.take_counters()
        moved = counters.global_load_bytes + counters.global_store_bytes
        row = Row(name, shape, needed, moved, allowed)
        if operations:
            made = {"shared atomics": counters.atomics, "shared stores": counters.shared_stores}[operations]
            row = replace(
                row,
                operations=f"10^6 {operations}",
                operations_needed=expected / 1e6,
                operations_made=made / 1e6,
            )
        rows.append(row)

    torch.manual_seed(0)
    ranks = [k * 9 // 10, k * 99 // 100, 0, 0]
    size = ranks[1] - ranks[0]
    # One pass counts and one collects; where one value or a wide range fills the bins, one finds the bins' extremes
    # and others narrow down.
    for kind, passes in (("unit", 2), ("outliers", 5), ("constant", 3), ("half infinite", 3)):
        similarities = make_similarities(kind, n, k)
        measure(
            lambda similarities=similarities: kernels.select(similarities, ranks, None),
            "select",
            f"N={n} K={k} {kind}",
            4 * n * k,
            1.1 * passes,
            "shared atomics",
            n * k,
        )
    similarities = make_similarities("unit", n, k)
    measure(
        lambda: Kernels(simt, 4).select(similarities, ranks, None),
        "prepare, count, collect, finish",
        f"N={n} K={k} unit, 4 blocks a row",
        4 * n * k,
        2.5,
        "shared atomics",
        n * k,
    )

    segments, capacity, count = 64, 128, 75
    keys = order_keys(torch.randn(n * segments, capacity)).view(n, segments, capacity)
    indices = torch.arange(segments * capacity, dtype=torch.int32).view(1, segments, capacity).repeat(n, 1, 1)
    counts = torch.full((n, segments), count, dtype=torch.int32)
    wanted = torch.tensor([[segments * count // 4, segments * count * 3 // 4]] * n)
    measure(
        lambda: kernels.select_candidates(keys, indices, counts, wanted),
        "select_candidates",
        f"N={n}, {segments} segments of {count}",
        4 * n * segments * count,
        5.5,  # extremes, two digits, the rest collected; and the segments' counts by every thread
        "shared atomics",
        n * segments * count,
    )

    boundaries = boundaries_of_ranks(similarities, ranks, None)
    for splits, passes in ((1, 1), (4, 2)):
        measure(
            lambda splits=splits: Kernels(simt, splits).compact(similarities, *boundaries, None, size, True),
            "compact" if splits == 1 else "count_members, compact",
            f"N={n} K={k} M={size}" + (f", {splits} blocks a row" if splits > 1 else ""),
            4 * n * k + 12 * n * size,
            1.25 * passes,
            "shared stores",
            2 * n * size,
        )
    uniform = torch.rand(n, samples, dtype=torch.float64)
    measure(
        lambda: kernels.draw(similarities, *boundaries, None, uniform, ranks, True),
        "compact, draw",
        f"N={n} K={k} S={samples}",
        4 * n * k + 4 * n * size + n * samples * (8 + 4 + 4 + 12),
        1.2,
        "shared stores",
        2 * n * size,
    )

    drawn = torch.stack(members(similarities, ranks, None))[:, :samples]
    gradient, matrix = torch.randn(n, samples), torch.randn(k, c)
    measure(
        lambda: kernels.query_gradient(gradient, drawn, matrix),
        "query_gradient, add_parts",
        f"N={n} M={samples} C={c}",
        12 * n * samples + 4 * n * samples * c + 4 * n * c,
        1.8,  # a warp's lanes load the same weight and index
    )
    few = k // 16  # as many of each key as with N=256 and a ring of a tenth
    measure(
        lambda: kernels.keys_gradient(gradient, drawn % few, matrix[:n], few),
        "keys_gradient",
        f"N={n} M={samples} C={c} K={few}",
        12 * n * samples + 4 * n * samples * c + 4 * few * c,
        1.5,
    )
    return rows


def main() -> None:
    from bench.ring.roofline_triton import triton_rows

    print(table(cuda_rows() + triton_rows()))


if __name__ == "__main__":
    main()
