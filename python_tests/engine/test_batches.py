"""Order of the images: from seed, epoch and position alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iecl_fast.engine.batches import EpochBatches, grouped


def flat(batches):
    return [index for batch in batches for index in batch]


@given(samples=st.integers(1, 60), size=st.integers(1, 70), epoch=st.integers(0, 5), seed=st.integers(0, 2**32 - 1))
def test_each_image_at_most_once_and_only_full_batches(samples, size, epoch, seed):
    batches = EpochBatches(samples, size, seed=seed, epoch=epoch)
    lists = list(batches)
    assert len(lists) == len(batches) >= 1
    assert {len(batch) for batch in lists} == {min(size, samples)}
    assert len(set(flat(lists))) == len(flat(lists))
    assert set(flat(lists)) <= set(range(samples))


def test_seed_and_epoch_each_change_the_order():
    orders = [tuple(flat(EpochBatches(50, 10, seed=seed, epoch=epoch))) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert orders[0] == tuple(flat(EpochBatches(50, 10, seed=0, epoch=0)))


@pytest.mark.parametrize("start", [0, 1, 4])
def test_start_leaves_out_the_first_batches(start):
    whole = list(EpochBatches(53, 10, seed=1, epoch=2))
    rest = EpochBatches(53, 10, seed=1, epoch=2, start=start)
    assert list(rest) == whole[start:]
    assert len(rest) == len(whole) - start


def test_ranks_share_each_batch():
    whole = list(EpochBatches(40, 8, seed=0, epoch=0))
    parts = [list(EpochBatches(40, 8, seed=0, epoch=0, rank=rank, world_size=4)) for rank in range(4)]
    for number, batch in enumerate(whole):
        assert {len(part[number]) for part in parts} == {2}
        assert flat(part[number] for part in parts) == batch  # gathered in rank order it is the batch again


def test_a_data_set_smaller_than_a_batch_is_one_batch_that_ranks_can_share():
    parts = [list(EpochBatches(7, 100, seed=0, epoch=0, rank=rank, world_size=2)) for rank in range(2)]
    assert [len(part) for part in parts] == [1, 1]
    assert [len(part[0]) for part in parts] == [3, 3]


def test_grouped_leaves_out_a_short_group():
    assert list(grouped(range(7), 3)) == [[0, 1, 2], [3, 4, 5]]
    assert list(grouped([], 2)) == []
