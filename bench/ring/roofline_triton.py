"""The Triton kernels of Ring on paper: bytes that they need by formula beside those that their compiled code asks for.

Loads and stores are counted in the PTX for compute capability 9.0, for every thread of a block, and multiplied by the
rounds of their loop and by the programs launched: what is asked of the caches, so an upper bound of what memory moves.
What all programs together need is counted once, as from a memory that never has to be asked again; that several blocks
of rows ask for the same keys is what the kernels' design allows. Instructions are counted in SASS, those of all threads
together. What bounds a kernel is a model: the longest of the bytes needed, the matrix operations and the instructions
at the rates of bench.machine_code; no time is measured.
"""

from math import prod
from typing import NamedTuple

import pytest
import torch
from ahead_of_time import Call, compile_for, disassembled
from launched_plans import RANKS, K, N, calls_of

from bench import machine_code
from bench.ring.roofline_rows import Row
from iecl_fast.ring import plan_recompute

# A handful of numbers for a row, or nothing unless a row was missed.
NOT_COUNTED = {"_sample_keys_kernel", "_place_kernel", "_fall_back_kernel"}


class Work(NamedTuple):
    """What a launch has to do. Loops are those of the compiled kernel, in their order."""

    name: str
    shape: str
    rounds: list[float]  # of each loop, by one program; a fraction where the last is masked
    round_bytes: list[int]  # that a block needs in a round of each loop
    needed: float  # bytes, by all programs
    allowed: float  # how many times these
    loops_allowed: float = 1  # how many times what its rounds need each loop may load
    operations: float = 0  # of matrices
    similarities: float = 0  # formed or read, where it is their number that counts
    chosen: float | None = None  # bytes that the loops store, where similarities decide it


def _is_called(call: Call) -> bool:
    constants = dict(call.launch.constants)
    return call.launch.kernel.__name__ not in NOT_COUNTED and not constants.get("ONLY_MISSED", False)


def calls() -> list[Call]:
    """Of both plans, forward and backward, and of samples and their gradients: N=256, K=65536, C=128.

    In bf16, and in tf32 what is of another kind there.
    """
    with pytest.MonkeyPatch.context() as patch:
        found = calls_of(patch, torch.bfloat16, "ieee", (128,))
        found += [
            call
            for call in calls_of(patch, torch.float32, "tf32", (128,))
            if "PRECISION" in dict(call.launch.constants)
        ]
    return [call for call in found if _is_called(call)]


def _candidates(num_keys: int) -> float:
    """Keys of a row that lie in the brackets of plan B', the mean."""
    size = plan_recompute.sample_size(num_keys)
    brackets = [plan_recompute.bracket(rank, num_keys, size) for rank in RANKS[:2]]
    return sum(end - first for first, end in brackets) * num_keys / size


def work_of(call: Call) -> Work:
    """By formula, from the numbers and constants that a kernel is launched with."""
    numbers, constants = dict(call.numbers), dict(call.launch.constants)
    size = 2 if "*bf16" in {kind for _, kind in call.launch.signature} else 4
    kernel = call.launch.kernel.__name__
    n, k = numbers.get("num_rows", call.grid[0]), numbers.get("num_keys", 0)
    c, samples = numbers.get("num_channels", 0), RANKS[1] - RANKS[0]
    block_rows, block_keys, block_channels, block = (
        numbers.get(name, 0) for name in ("ROWS", "KEYS", "CHANNELS", "BLOCK")
    )
    vectors, key_tile = size * (n + k) * c, size * block_keys * block_channels
    shape = f"N={n} K={k} C={c}, {'bf16' if size == 2 else 'tf32'}"
    product = {"operations": 2 * n * k * c, "similarities": n * k}

    match kernel:
        case "_product_kernel":
            tile = key_tile + size * block_rows * block_channels
            allowed = 1.7 if size == 2 else 3.5  # of tiles with 128 or 64 rows and keys
            return Work("product, plan C", shape, [c / block_channels], [tile], vectors + 4 * n * k, allowed, **product)
        case "_sample_kernel":
            m = numbers["size"]
            shape, needed = f"N={n} m={m} C={c}, bf16", size * (n + m) * c + 4 * m + 4 * n * m
            operations = 2 * n * m * c
            return Work("sample, plan B'", shape, [], [], needed, 2.7, operations=operations, similarities=n * m)
        case "_count_kernel":
            return Work("count, plan B'", shape, [numbers["split_tiles"]], [key_tile], vectors, 5, **product)
        case "_collect_kernel":
            chosen, rounds = 8 * n * _candidates(k), [numbers["split_tiles"]]
            needed = vectors + chosen
            return Work("collect, plan B'", shape, rounds, [key_tile], needed, 3.8, **product, chosen=chosen)
        case "_weigh_kernel":
            rounds, sums = [numbers["split_tiles"]], 4 * call.grid[1] * n * (c + 2)
            if "similarities" in dict(call.launch.signature):
                tile, needed = 4 * block_rows * block_keys + key_tile, size * k * c + sums + 4 * n * k
                return Work("weigh, plan C", shape, rounds, [tile], needed, 1.7, **product)
            product["operations"] *= 2
            return Work("weigh, plan B'", shape, rounds, [key_tile], vectors + sums, 3.5, **product)
        case "_combine_kernel":
            splits, plan = numbers["splits"], "B'" if constants["CHECK"] else "C"
            rounds, tiles = [1, 1, splits], [2 * size * c, size * c, 4 * c + 8]
            if not constants["CHECK"]:  # the compiler writes the case of no split apart
                rounds, tiles = [*rounds, 0], [*tiles, size * c]
            needed = n * splits * (4 * c + 8) + n * (2 * size * c + 4 * c + 12)
            shape = f"N={n} C={c}, {splits} splits"
            # All threads load a split's two numbers from one place.
            return Work(f"combine, plan {plan}", shape, rounds, tiles, needed, 3.1, loops_allowed=3)
        case "_select_kernel":
            name, shape = ("select", f"N={n} K={k}") if k == K else ("select in the sample, plan B'", f"N={n} m={k}")
            # Four digits and the tie.
            return Work(name, shape, [k / block] * 5, [4 * block] * 5, 4 * n * k, 5.3, similarities=n * k)
        case "_select_candidates_kernel":
            candidates = _candidates(K)
            rounds = [1] + [1, candidates / block] * 5  # of segments and within them
            tiles = [4] + [4, 4 * block] * 4 + [4, 8 * block]
            name, shape = "select_candidates, plan B'", f"N={n}, {candidates:.0f} candidates"
            # A segment's count is loaded by all threads.
            return Work(name, shape, rounds, tiles, 4 * n * candidates, 7.3, loops_allowed=1.1)
        case "_compact_kernel":
            chosen, shape = 12 * n * samples, f"N={n} K={k} M={samples}"
            needed, counts = 4 * n * k + chosen, {"similarities": n * k, "chosen": chosen}
            return Work("compact", shape, [k / block], [4 * block], needed, 1.1, **counts)
        case "_keys_gradient_kernel":
            # Similarities, queries and the boundaries, denominator and slope of each row; these 36 bytes are loaded by
            # all 8 threads that have a part of the row, and by twice as many with Triton 3.6.
            tile = 4 * block_rows * block_keys + size * block_rows * block_channels + 36 * block_rows
            needed, allowed = 4 * n * k + size * n * c + 8 * k * c, 2.7 if size == 2 else 3.2
            rounds = [n / block_rows]
            return Work("keys_gradient", shape, rounds, [tile], needed, allowed, loops_allowed=2, **product)
    block, gathered = numbers["SAMPLES"], N * samples * (12 + size * c)
    tile = block * (12 + size * block_channels)
    # A sample's weight and index are loaded by all threads that have a part of its vector.
    match kernel:
        case "_sample_query_gradient_kernel":
            name, shape, needed = "sample_query_gradient", f"N={N} M={samples} C={c}, bf16", gathered + 4 * N * c
            return Work(name, shape, [samples / block], [tile], needed, 1.7, loops_allowed=1.7)
        case "_sample_keys_gradient_kernel":
            name, shape = "sample_keys_gradient", f"N={N} M={samples} C={c} K={K}, bf16"
            rounds, needed = [N * samples / K / block] * 2, gathered + 4 * K * c
            # One loop that jumps back to two places, as if it were two.
            return Work(name, shape, rounds, [0, tile], needed, 2, loops_allowed=1.7)
    raise ValueError(f"no formula for {kernel}")


def loop_bytes(call: Call) -> list[int]:
    """Bytes that a block loads in a round of each loop."""
    _, loops = machine_code.parts(compile_for(call.launch, 90).ptx)
    return [32 * call.launch.warps * loop.loaded for loop in loops]


def row(call: Call) -> Row:
    work, code = work_of(call), compile_for(call.launch, 90)
    threads = 32 * call.launch.warps * prod(call.grid)
    once, loops = machine_code.parts(code.ptx)
    # Copies to shared memory before a loop belong to its first rounds; its last copy nothing.
    moved = once.loaded - once.copied + once.stored
    for rounds, loop in zip(work.rounds, loops, strict=True):
        moved += rounds * (loop.loaded + (loop.stored if work.chosen is None else 0))
    moved = moved * threads + (work.chosen or 0)

    matrix_type = "tf32" if dict(call.launch.constants).get("PRECISION") == "tf32" else "bf16"
    seconds = {
        "memory": work.needed / machine_code.BYTES_PER_SECOND,
        "matrix unit": work.operations / machine_code.OPERATIONS_PER_SECOND[matrix_type],
    }
    operations, made = "", None
    if work.similarities:
        once, loops = machine_code.parts(disassembled(code))
        in_loops = sum(rounds * loop.instructions for rounds, loop in zip(work.rounds, loops, strict=True))
        in_loops, made = (threads * count / work.similarities for count in (in_loops, in_loops + once.instructions))
        operations = "instructions a similarity" + (f", {in_loops:.1f} of them in loops" if loops else "")
        seconds["instructions"] = made * work.similarities / machine_code.INSTRUCTIONS_PER_SECOND
    bound = max(seconds, key=seconds.get) if work.similarities else "memory, instructions aside"
    return Row(work.name, work.shape, work.needed, moved, work.allowed, operations, None, made, bound)


def triton_rows() -> list[Row]:
    # Both boundaries of the sample are found by equal calls.
    return list(dict.fromkeys(map(row, calls())))
