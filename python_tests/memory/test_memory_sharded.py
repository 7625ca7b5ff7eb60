"""A bank in parts, where one process tells. What ranks do together is in ssl/test_sharded_ranks.py."""

import copy

import pytest
import torch

from iecl_fast import MemoryBank, memory_sharded
from iecl_fast.exchange import Exchange
from iecl_fast.memory_sharded import ShardedMemoryBank


def on_rank(monkeypatch, rank, size):
    """Banks are built as on a rank of a group; what a group does together is not to be had."""

    def exchange():
        alone = Exchange()
        alone.rank, alone.size = rank, size
        return alone

    monkeypatch.setattr(memory_sharded, "Exchange", exchange)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize(("num_items", "dim"), [(1000, 3), (129, 16), (65, 1), (64, 5), (2, 4)])
def test_the_parts_begin_as_a_bank_does(num_items, dim, size, monkeypatch):
    """In pieces of 64 entries; the random state is the same after."""
    torch.manual_seed(3)
    whole, after = MemoryBank(num_items, dim), torch.rand(2)
    monkeypatch.setattr(memory_sharded, "ROWS_AT_ONCE", 64)
    parts = []
    for rank in range(size):
        on_rank(monkeypatch, rank, size)
        torch.manual_seed(3)
        parts.append(ShardedMemoryBank(num_items, dim))
        assert torch.equal(torch.rand(2), after)
    assert torch.equal(torch.cat([part.keys for part in parts]), whole.keys)
    assert [part.start for part in parts[1:]] == [part.end for part in parts[:-1]]
    assert max(len(part.keys) for part in parts) - min(len(part.keys) for part in parts) <= 1


def test_alone_it_is_a_bank():
    torch.manual_seed(0)
    bank, index, keys = MemoryBank(9, 4, momentum=0.3), torch.tensor([4, 8, 4, 0]), torch.randn(4, 4)
    torch.manual_seed(0)
    sharded = ShardedMemoryBank(9, 4, momentum=0.3)
    for each in (bank, sharded):
        each.update(keys, index)
    assert torch.equal(sharded.keys, bank.keys)
    assert torch.equal(sharded.entries(index), bank.entries(index))
    assert list(sharded.buffers()) == []  # which DistributedDataParallel would make those of rank 0
    resumed = ShardedMemoryBank(9, 4)
    resumed.load_state_dict(bank.state_dict())
    bank.load_state_dict(resumed.state_dict())
    assert torch.equal(resumed.keys, bank.keys)


def test_loads_its_own_part_of_the_whole(monkeypatch):
    whole = MemoryBank(10, 4).state_dict()
    for rank, part in enumerate((slice(0, 3), slice(3, 6), slice(6, 10))):
        on_rank(monkeypatch, rank, 3)
        bank = ShardedMemoryBank(10, 4)
        bank.load_state_dict(whole)
        assert torch.equal(bank.keys, whole["keys"][part])
        assert repr(bank) == f"ShardedMemoryBank(num_items=10, dim=4, momentum=0.5, here={part.start}..{part.stop - 1})"


def test_moves_and_copies_like_a_buffer():
    bank = torch.nn.Sequential(ShardedMemoryBank(5, 2)).double()
    assert bank[0].keys.dtype == torch.float64
    other = copy.deepcopy(bank)
    other[0].update(torch.randn(1, 2), torch.tensor([0]))
    assert not torch.equal(other[0].keys, bank[0].keys)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, 'Missing key.* "keys"'),
        ({"keys": torch.zeros(3, 2)}, r"keys has the shape \(3, 2\), the whole bank's is \(5, 2\)"),
        ({"keys": torch.zeros(5, 2), "pointer": torch.zeros(())}, 'Unexpected key.* "pointer"'),
    ],
)
def test_what_does_not_fit_is_refused(state, words):
    bank = ShardedMemoryBank(5, 2)
    before = bank.keys.clone()
    with pytest.raises(RuntimeError, match=words):
        bank.load_state_dict(state)
    if "pointer" not in state:
        assert torch.equal(bank.keys, before)
    bank.load_state_dict({}, strict=False)


def test_the_number_of_ranks_may_not_change(monkeypatch):
    bank = ShardedMemoryBank(5, 2)
    on_rank(monkeypatch, 1, 2)
    with pytest.raises(RuntimeError, match="made for rank 0 of 1, this is rank 1 of 2"):
        bank.update(torch.zeros(1, 2), torch.tensor([0]))


@pytest.mark.parametrize(
    ("keys", "index", "error", "words"),
    [
        (torch.zeros(3, 5), torch.arange(3), ValueError, r"keys must have shape \(N, 4\), got \(3, 5\)"),
        (torch.zeros(3, 4), torch.zeros(3), TypeError, "index must be integers, got torch.float32"),
        (torch.zeros(3, 4), torch.tensor([0, 8, 1]), ValueError, r"index must lie in 0\.\.7, got 8"),
    ],
)
def test_errors_are_those_of_a_bank(keys, index, error, words):
    with pytest.raises(error, match=words):
        ShardedMemoryBank(8, 4).update(keys, index)
    with pytest.raises(ValueError, match="num_items must be at least 1, got 0"):
        ShardedMemoryBank(0, 4)
