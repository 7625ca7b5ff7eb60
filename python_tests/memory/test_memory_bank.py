import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from iecl_fast import MemoryBank


def unit_rows(n, dim=4):
    return F.normalize(torch.randn(n, dim), dim=1)


def update_one_by_one(entries, keys, index, momentum):
    """The definition: an index moves once, from what it was before the batch, towards its last key."""
    expected = entries.clone()
    for row, key in zip(index.tolist(), keys.double(), strict=True):
        mixture = momentum * entries[row].double() + (1 - momentum) * key
        expected[row] = (mixture / mixture.norm()).float()
    return expected


def test_unit_rows_from_the_start():
    bank = MemoryBank(1000, 16)
    assert bank.keys.dtype == torch.float32 and bank.keys.is_contiguous()
    torch.testing.assert_close(bank.keys.norm(dim=1), torch.ones(1000))
    assert bank.keys.mean(dim=0).abs().max() < 0.1  # in every direction, not one
    assert set(bank.state_dict()) == {"keys"}


@given(
    num_items=st.integers(1, 9),
    batches=st.lists(st.lists(st.integers(0, 8), max_size=12), max_size=4),
    momentum=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_any_batches_with_any_duplicates(num_items, batches, momentum):
    torch.manual_seed(0)
    bank = MemoryBank(num_items, 4, momentum)
    for batch in batches:
        index = torch.tensor([i % num_items for i in batch], dtype=torch.int64)
        keys = unit_rows(len(index))
        expected = update_one_by_one(bank.keys, keys, index, momentum)
        bank.update(keys, index)
        torch.testing.assert_close(bank.keys, expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(bank.keys.norm(dim=1), torch.ones(num_items))


class Writes(TorchDispatchMode):
    """Notes what index_copy_ writes where."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.index_copy_.default:
            _, _, self.index, self.rows = args
        return function(*args, **(kwargs or {}))


def test_the_last_of_many_duplicates_wins_whoever_writes_last():
    """A thousand keys for three entries. A GPU's writers come in any order: all have to write the same."""
    bank = MemoryBank(3, 8, momentum=0.5)
    before = bank.keys.clone()
    index, keys = torch.arange(1000) % 3, unit_rows(1000, 8)
    with Writes() as writes:
        bank.update(keys, index)
    torch.testing.assert_close(bank.keys, F.normalize(before + keys[[999, 997, 998]], dim=1))
    assert torch.equal(writes.index, index)
    assert torch.equal(writes.rows, bank.keys[index])


def test_what_has_no_direction_leaves_the_entry_alone():
    bank = MemoryBank(3, 2, momentum=0.5)
    bank.keys.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
    before = bank.keys.clone()
    bank.update(-before[:2], torch.tensor([0, 1]))  # opposite keys
    assert torch.equal(bank.keys, before)
    replaced = MemoryBank(3, 2, momentum=0.0)
    before = replaced.keys.clone()
    replaced.update(torch.zeros(2, 2), torch.tensor([2, 2]))  # the embedding of a black image
    assert torch.equal(replaced.keys, before)
    replaced.update(torch.tensor([[torch.inf, 0.0], [torch.nan, 1.0]]), torch.tensor([0, 1]))  # of a diverged network
    assert torch.equal(replaced.keys, before)


def test_detaches_and_converts_and_honours_strides():
    bank = MemoryBank(6, 2, momentum=0.0)
    keys = torch.randn(2, 6, dtype=torch.float16, requires_grad=True)
    before = keys.detach().clone()
    bank.update(keys.T[::2], torch.tensor([4, 0, 2], dtype=torch.int32))
    assert bank.keys.dtype == torch.float32 and not bank.keys.requires_grad
    torch.testing.assert_close(bank.keys[[4, 0, 2]], F.normalize(before.float().T[::2], dim=1))
    assert torch.equal(keys, before)


def test_resumed_bank_continues_exactly():
    bank = MemoryBank(5, 4)
    bank.update(unit_rows(3), torch.tensor([0, 1, 0]))
    resumed = MemoryBank(5, 4)
    resumed.load_state_dict(bank.state_dict())
    keys, index = unit_rows(4), torch.tensor([1, 4, 4, 2])
    for each in (bank, resumed):
        each.update(keys, index)
    assert torch.equal(bank.keys, resumed.keys)


@pytest.mark.parametrize(
    ("keys", "index", "error", "words"),
    [
        (torch.zeros(3, 5), torch.arange(3), ValueError, r"keys must have shape \(N, 4\), got \(3, 5\)"),
        (torch.zeros(3, 4, dtype=torch.int64), torch.arange(3), TypeError, "floating point, got torch.int64"),
        (torch.zeros(3, 4), torch.arange(2), ValueError, r"index must have shape \(3,\), .* got \(2,\)"),
        (torch.zeros(3, 4), torch.zeros(3), TypeError, "index must be integers, got torch.float32"),
        (torch.zeros(3, 4), torch.tensor([0, 8, 1]), ValueError, r"index must lie in 0\.\.7, got 8"),
        (torch.zeros(3, 4), torch.tensor([0, -1, 1]), ValueError, r"index must lie in 0\.\.7, got -1"),
    ],
)
def test_errors_name_what_came(keys, index, error, words):
    bank = MemoryBank(8, 4)
    before = bank.keys.clone()
    with pytest.raises(error, match=words):
        bank.update(keys, index)
    assert torch.equal(bank.keys, before)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((0, 4), "num_items"), ((4, 0), "dim"), ((4, 4, 1.5), r"momentum must lie in 0\.\.1, got 1\.5")],
)
def test_errors_of_the_sizes(arguments, words):
    with pytest.raises(ValueError, match=words):
        MemoryBank(*arguments)


def test_repr_shows_the_sizes():
    assert repr(MemoryBank(8, 4)) == "MemoryBank(num_items=8, dim=4, momentum=0.5)"
