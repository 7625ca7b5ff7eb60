"""SAIB on a GPU on paper: python -m bench.saib.roofline

A model, not a measurement. For each kernel of a training step: operations and bytes that it cannot do without
(formulas), beside the bytes that its main loops ask of the second-level cache, counted in the PTX compiled for compute
capability 9.0. The floor is the larger of operations over the chip's arithmetic rate and bytes over its bandwidth (data
sheet of an H100 SXM, dense bf16). Needs Triton and no GPU.
"""

import sys
from math import ceil
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "python_tests"))

from ahead_of_time import Launch, compile_for, recorded_launches

from bench.machine_code import BYTES_PER_SECOND, OPERATIONS_PER_SECOND, parts
from iecl_fast.saib import triton
from iecl_fast.saib import triton_plan as plan

# N, height, patch, channels_are_batch
SHAPES = [
    (256, 224, 16, True),
    (128, 224, 16, True),
    (256, 32, 4, True),
    (64, 32, 4, True),
    (64, 224, 16, False),
    (256, 32, 4, False),
]


def launches_of(n: int, side: int, patch: int, channels_are_batch: bool) -> list[Launch]:
    """Of a forward and a backward pass in bf16 with all gradients."""
    d = n if channels_are_batch else 3 * patch * patch

    def empty(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    tensors = [empty(n, 3, side, side), empty(3 * (side // patch) ** 2, patch * patch), empty(d, d, 1, 1)]
    tensors += [empty(2 * d, d, 3, 3), empty(2 * d, 2 * d, 1, 1), empty(d, 2 * d, 1, 1)]
    options = patch, channels_are_batch, "relu", "free"

    def both():
        _, saved = triton.forward(*tensors, *options, True)
        triton.backward(torch.empty_like(tensors[0]), *tensors, saved, *options, [True] * 6)

    with pytest.MonkeyPatch.context() as patch_:
        # In one piece: pieces do the same in more launches.
        patch_.setattr(plan, "units_at_once", lambda units, *_: units)
        launches = recorded_launches(patch_, both)
    return [launch for launch in launches if launch.kernel.__name__ != "ordered_sum_kernel"]


def row(launch: Launch, positions: int) -> tuple[str, float, float, float]:
    """Name, operations, necessary bytes, bytes asked of the second-level cache."""
    c = dict(launch.constants)
    _, loops = parts(compile_for(launch, 90).ptx)
    rounds = [32 * launch.warps * loop.loaded for loop in loops if loop.has_matrix_instructions]
    name = launch.kernel.__name__
    if name == "tail_kernel":
        k, n = c["K"], c["N"]
        operations = 2 * positions * (9 * k * n + n * n + n * k)
        needed = 2 * positions * (3 * k + n)
        rounds_each = (9 * ceil(k / c["BLOCK_K"]), ceil(n / c["BLOCK_T"]))
        asked = ceil(positions / c["BLOCK_M"]) * sum(a * b for a, b in zip(rounds, rounds_each))
        return "3x3, W3, W4, skips", operations, needed, asked
    if name == "weight_gradient_kernel":
        o, k, taps = c["O"], c["K"], c["TAPS"]
        programs = taps * ceil(o / c["BLOCK_O"]) * ceil(k / c["BLOCK_I"])
        from_image = c["GRADIENT_IMAGE"] or c["FEATURES_IMAGE"]
        splits = plan.weight_splits(2, positions, taps, o, k, from_image)
        needed = 2 * positions * (o + k) + 2 * 4 * splits * taps * o * k
        asked = programs * ceil(positions / c["BLOCK_P"]) * sum(rounds)
        return f"gradient of {o} x {k} x {taps}", 2 * positions * taps * o * k, needed, asked
    k, n, taps = c["K"], c["N"], c["TAPS"]
    beside = 2 * n if c["EPILOGUE"] in ("skip", "relu_gradient", "silu_gradient") else n
    tiles = ceil(positions / c["BLOCK_M"]) * ceil(n / c["BLOCK_N"])
    asked = tiles * taps * ceil(k / c["BLOCK_K"]) * sum(rounds)
    title = f"{k} -> {n}, {taps} taps, {'transposed, ' if c['TRANSPOSED'] else ''}{c['EPILOGUE']}"
    return title, 2 * positions * taps * k * n, 2 * positions * (k + beside), asked


def main() -> None:
    for n, side, patch, channels_are_batch in SHAPES:
        positions = 3 * side * side if channels_are_batch else n * (side // patch) ** 2
        mode = "batch" if channels_are_batch else "patch"
        print(f"\n### N={n}, {side} x {side}, p={patch}, channels={mode}: a training step's kernels, modelled\n")
        print("| kernel | GFLOP | MB needed | MB asked of L2 | FLOP / byte of L2 | floor, us | bound by |")
        print("|---|--:|--:|--:|--:|--:|---|")
        total = 0.0
        for launch in launches_of(n, side, patch, channels_are_batch):
            title, operations, needed, asked = row(launch, positions)
            arithmetic, memory = operations / OPERATIONS_PER_SECOND["bf16"], needed / BYTES_PER_SECOND
            total += max(arithmetic, memory)
            print(
                f"| {title} | {operations / 1e9:.1f} | {needed / 1e6:.1f} | {asked / 1e6:.0f} "
                f"| {operations / max(asked, 1):.0f} | {max(arithmetic, memory) * 1e6:.1f} "
                f"| {'arithmetic' if arithmetic > memory else 'memory'} |"
            )
        print(f"| all | | | | | {total * 1e6:.0f} | |")


if __name__ == "__main__":
    main()
