"""The CUDA execution model of csrc/simt: sound kernels get CUDA's results, planted faults are found and named."""

from pathlib import Path

import numpy as np
import pytest
import torch
from simt_build import build_simt_module

HERE = Path(__file__).parent
ALL = 0xFFFFFFFF


@pytest.fixture(scope="module")
def simt():
    return build_simt_module("simt_faults", HERE / "kernels.cpp", HERE / "bindings.cpp")


def signed(bits):
    return np.array(bits & ALL, dtype=np.uint32).astype(np.int32)


# ---- sound kernels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [64, 256])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_block_sum(simt, threads, seed):
    simt.set_seed(seed)
    values = np.random.default_rng(seed).integers(-50, 50, 3001).astype(np.float32)
    sums = np.full(5, np.nan, dtype=np.float32)
    simt.block_sum(values, sums, threads, 5)
    assert sums.sum() == values.sum()


@pytest.mark.parametrize("dynamic", [False, True])
def test_shared_memory_carries_values_between_threads(simt, dynamic):
    values, out = np.arange(64, dtype=np.int32), np.zeros(64, dtype=np.int32)
    simt.reverse(values, out, dynamic, 0)
    assert (out == values[::-1]).all()


def test_grid_and_block_indices(simt):
    out = np.zeros(3 * 2 * 4 * 5, dtype=np.int32)
    simt.indices(out, 3, 2, 4, 5)
    block, thread = np.divmod(np.arange(len(out)), 20)
    assert (out == 1000 * block + thread).all()


def test_warp_votes_and_reductions(simt):
    values = np.random.default_rng(0).integers(-8, 8, 32).astype(np.int32)
    out = np.zeros((32, 12), dtype=np.int32)
    simt.warp_results(values, out)
    unsigned = values.view(np.uint32)
    ballot = sum(1 << lane for lane in range(32) if values[lane] > 0)
    for lane in range(32):
        equal = sum(1 << other for other in range(32) if values[other] == values[lane])
        half = values[:16] if lane < 16 else values[16:]
        expected = [
            signed(ballot),
            (values == 5).any(),
            (values > -100).all(),
            values.sum(),
            values.min(),
            values.max(),
            np.bitwise_or.reduce(unsigned).view(np.int32),
            np.bitwise_and.reduce(unsigned).view(np.int32),
            np.bitwise_xor.reduce(unsigned).view(np.int32),
            signed(equal),
            half.sum(),
            (half > 0).sum(),
        ]
        assert out[lane].tolist() == [int(value) for value in expected], lane


@pytest.mark.parametrize("width", [32, 16, 4])
def test_shuffles_stay_within_their_segment(simt, width):
    values, out = np.arange(32, dtype=np.float32) * 10, np.zeros((4, 32), dtype=np.float32)
    simt.shuffles(values, width, out)
    lanes = np.arange(32)
    first = lanes // width * width
    up, down, crossed = lanes - 2, lanes + 2, lanes ^ 5
    sources = (
        first + 3 % width,
        np.where(up < first, lanes, up),
        np.where(down >= first + width, lanes, down),
        # As CUDA documents it: lanes of earlier segments can be read, those of later ones cannot.
        np.where(crossed >= first + width, lanes, crossed),
    )
    for got, source in zip(out, sources):
        assert (got == values[source]).all()


@pytest.mark.parametrize("true", [0, 7, 40])
def test_barriers_that_vote(simt, true):
    predicates = (np.arange(40) < true).astype(np.int32)
    out = np.zeros((40, 3), dtype=np.int32)
    simt.votes(predicates, out)
    assert (out == [true, true == 40, true > 0]).all()


def test_atomics_in_shared_and_global_memory(simt):
    values = np.random.default_rng(0).integers(0, 10, 500).astype(np.int32)
    bins = np.zeros(10, dtype=np.int32)
    simt.take_counters()
    simt.histogram(values, bins)
    assert (bins == np.bincount(values, minlength=10)).all()
    assert simt.take_counters().atomics == 500 + 3 * 10


def test_sixteen_bit_types(simt):
    half = torch.tensor([1.5, -0.25, 65504.0, 6e-8, -0.0, 1 / 3], dtype=torch.float16)
    bfloat16 = torch.tensor([3.0, 1e-3, 1e4, 6e-8, 0.0, 1 / 3], dtype=torch.bfloat16)
    out = np.zeros(6, dtype=np.float32)
    back = np.zeros((2, 6), dtype=np.uint16)
    bits = [tensor.view(torch.int16).numpy() for tensor in (half, bfloat16)]
    simt.sixteen_bit(*bits, out, *back)
    expected = half.float() + bfloat16.float()
    assert torch.equal(torch.from_numpy(out), expected)
    for got, dtype in zip(back, (torch.float16, torch.bfloat16)):
        assert torch.equal(torch.from_numpy(got.view(np.int16)).view(dtype), expected.to(dtype))


# ---- the order of threads ------------------------------------------------------------------------------------------


def test_order_of_threads_is_shuffled_and_seeded(simt):
    def order(seed):
        simt.set_seed(seed)
        out = np.zeros(65, dtype=np.int32)
        simt.order(out)
        return out[:64].tolist()

    assert order(3) == order(3)
    assert order(3) != order(4)
    assert sorted(order(3)) == list(range(64)) != order(3)


# ---- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_missing_barrier_is_found_in_every_order(simt, seed):
    simt.set_seed(seed)
    values, sums = np.ones(256, dtype=np.float32), np.zeros(1, dtype=np.float32)
    with pytest.raises(RuntimeError, match=r"block \(0,0,0\), thread \(\d+,0,0\): race on shared memory"):
        simt.block_sum_without_barrier(values, sums, 64, 1)


def test_missing_warp_barrier(simt):
    out = np.zeros(32, dtype=np.int32)
    simt.warp_staging(out, True)
    assert (out == 33 - np.arange(32)).all()
    with pytest.raises(RuntimeError, match="race on shared memory"):
        simt.warp_staging(out, False)


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [(False, r"index 64 out of bounds at .*kernels\.cpp:\d+"), (True, "out-of-bounds shared index: byte 256 of 256")],
)
def test_shared_index_out_of_bounds(simt, dynamic, message):
    values, out = np.arange(64, dtype=np.int32), np.zeros(64, dtype=np.int32)
    with pytest.raises(RuntimeError, match=r"block \(0,0,0\), thread \(63,0,0\): " + message):
        simt.reverse(values, out, dynamic, 1)


@pytest.mark.parametrize("offset", [-1, 2])
def test_global_access_out_of_bounds(simt, offset):
    values, out = np.arange(101, dtype=np.int32), np.zeros(100, dtype=np.int32)
    simt.shift_global(values, out, 1)
    assert (out == values[1:]).all()
    with pytest.raises(RuntimeError, match=r"thread .*: reads 4 bytes outside of every buffer"):
        simt.shift_global(values, out, offset)


@pytest.mark.parametrize(("early_exit", "what"), [(True, "exited"), (False, "waits at|exited")])
def test_divergent_barrier(simt, early_exit, what):
    with pytest.raises(RuntimeError, match=rf"block \(0,0,0\), thread .*divergent barrier at .*kernels\.cpp.*({what})"):
        simt.divergent_barrier(32, early_exit)


def test_different_barriers_are_not_one(simt):
    with pytest.raises(RuntimeError, match=r"divergent barrier at .*:\d+: thread .* waits at .*:\d+"):
        simt.two_barriers()


def test_shared_memory_is_poisoned_for_each_block(simt):
    out = np.zeros(8, dtype=np.float32)
    simt.uninitialised(out)
    assert np.isnan(out).all()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (0, "mask without its own lane"),
        (1, r"waits for lane 8, which has exited"),
        (2, r"waits for lane \d+, which is in __a(ny|ll)_sync at"),
        (3, "reads lane 9, which is not in its mask"),
    ],
)
def test_masks_that_do_not_fit_the_lanes(simt, fault, message):
    with pytest.raises(RuntimeError, match=message):
        simt.wrong_mask(fault)


@pytest.mark.parametrize("launch", [(0, 1, 32, 1), (1, 65536, 1, 1), (1, 1, 1025, 1), (1, 1, 0, 1)])
def test_launches_that_cuda_refuses(simt, launch):
    with pytest.raises(RuntimeError, match="invalid launch"):
        simt.indices(np.zeros(1, dtype=np.int32), *launch)


def test_a_fault_does_not_spoil_the_next_launch(simt):
    with pytest.raises(RuntimeError, match="divergent barrier"):
        simt.divergent_barrier(32, True)
    test_block_sum(simt, 64, 0)


# ---- counters ------------------------------------------------------------------------------------------------------


def test_counters_count_what_a_kernel_moves(simt):
    values, out = np.arange(101, dtype=np.int32), np.zeros(100, dtype=np.int32)
    simt.take_counters()
    simt.shift_global(values, out, 1)
    counters = simt.take_counters()
    assert (counters.global_loads, counters.global_load_bytes) == (100, 400)
    assert (counters.global_stores, counters.global_store_bytes) == (100, 400)
    assert (counters.shared_loads, counters.shared_stores, counters.atomics) == (0, 0, 0)
    assert (counters.launches, counters.barriers) == (1, 0)
    simt.reverse(values[:64], np.zeros(64, dtype=np.int32), True, 0)
    counters = simt.take_counters()
    assert (counters.shared_loads, counters.shared_stores, counters.barriers) == (64, 64, 1)
