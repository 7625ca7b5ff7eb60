import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iecl_fast.memory import MemoryQueue, gather_rows


def numbered(start, count):
    """Keys (count, 2) that can be told apart: row i holds the number start + i."""
    return torch.arange(start, start + count).float()[:, None].expand(count, 2)


def in_order(queue):
    """The queue's rows, oldest first."""
    return torch.roll(queue.keys, -int(queue.pointer), dims=0)


@given(num_keys=st.integers(1, 12), sizes=st.lists(st.integers(0, 30), max_size=12))
def test_after_any_batches_it_holds_the_last_keys_in_order(num_keys, sizes):
    queue = MemoryQueue(num_keys, 2, with_ids=True)
    initial = queue.keys.clone()
    for start, size in zip([0, *torch.tensor(sizes).cumsum(0).tolist()], sizes, strict=False):
        queue.enqueue(numbered(start, size), torch.arange(start, start + size))

    history = torch.cat([initial, numbered(0, sum(sizes))])
    assert torch.equal(in_order(queue), history[-num_keys:])
    history_ids = torch.cat([torch.full((num_keys,), -1), torch.arange(sum(sizes))])
    assert torch.equal(torch.roll(queue.ids, -int(queue.pointer)), history_ids[-num_keys:])
    assert queue.pointer == sum(sizes) % num_keys
    assert queue.filled == min(sum(sizes), num_keys)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 15, 16, 25])
def test_named_batch_sizes_wrap(size):
    queue = MemoryQueue(8, 2)
    queue.enqueue(numbered(0, 5))
    queue.enqueue(numbered(5, size))
    assert torch.equal(in_order(queue)[-min(8, 5 + size) :], numbered(0, 5 + size)[-8:])


def test_unit_rows_from_the_start():
    queue = MemoryQueue(1000, 16)
    assert queue.keys.dtype == torch.float32 and queue.keys.is_contiguous()
    torch.testing.assert_close(queue.keys.norm(dim=1), torch.ones(1000))
    assert queue.keys.mean(dim=0).abs().max() < 0.05  # in every direction, not one
    assert queue.filled == 0


def test_resumed_queue_continues_exactly():
    queue = MemoryQueue(5, 2, with_ids=True)
    queue.enqueue(numbered(0, 3), torch.arange(3))
    resumed = MemoryQueue(5, 2, with_ids=True)
    resumed.load_state_dict(queue.state_dict())
    for each in (queue, resumed):
        each.enqueue(numbered(3, 4), torch.arange(3, 7))
    for name, buffer in queue.state_dict().items():
        assert torch.equal(buffer, resumed.state_dict()[name]), name
    assert set(queue.state_dict()) == {"keys", "pointer", "filled", "ids"}


def test_detaches_and_converts_and_leaves_the_input_alone():
    queue = MemoryQueue(4, 2)
    keys = torch.randn(3, 2, dtype=torch.float16, requires_grad=True)
    before = keys.detach().clone()
    queue.enqueue(keys)
    assert queue.keys.dtype == torch.float32 and not queue.keys.requires_grad
    assert torch.equal(queue.keys[:3], before.float())
    assert torch.equal(keys, before)


def test_every_stride_is_honoured():
    keys = torch.randn(2, 6)
    queue = MemoryQueue(4, 2)
    queue.enqueue(keys.T[::2])
    assert torch.equal(queue.keys[:3], keys.T[::2].contiguous())


def test_deepcopy_is_independent():
    queue = MemoryQueue(4, 2)
    other = copy.deepcopy(queue)
    other.enqueue(numbered(0, 2))
    assert queue.filled == 0 and other.filled == 2 and not torch.equal(queue.keys, other.keys)


def test_rows_of_finds_the_newest_key():
    queue = MemoryQueue(4, 2, with_ids=True)
    assert queue.rows_of(torch.tensor([0, 7])).tolist() == [-1, -1]
    queue.enqueue(numbered(0, 3), torch.tensor([5, 6, 5]))
    assert queue.rows_of(torch.tensor([5, 6, 9])).tolist() == [2, 1, -1]
    queue.enqueue(numbered(3, 3), torch.tensor([8, 5, 9]))  # wraps: row 0 holds the newest 5, row 1 holds 9
    assert queue.rows_of(torch.tensor([5, 6, 8, 9])).tolist() == [0, -1, 3, 1]


def test_rows_of_serves_as_exclude():
    from iecl_fast.ring import ring_info_nce

    query = torch.nn.functional.normalize(torch.randn(3, 8), dim=1)
    queue = MemoryQueue(6, 8, with_ids=True)
    queue.enqueue(query, torch.tensor([10, 11, 12]))
    losses = [
        ring_info_nce(query, query, queue.keys, exclude=exclude, reduction="none")
        for exclude in (None, queue.rows_of(torch.tensor([10, 11, 12])))
    ]
    assert (losses[0] > losses[1] + 0.3).all()  # without its own key as a negative the loss loses about log 2


@pytest.mark.parametrize(
    ("keys", "ids", "error", "words"),
    [
        (torch.zeros(3, 5), None, ValueError, r"keys must have shape \(N, 4\), got \(3, 5\)"),
        (torch.zeros(4), None, ValueError, r"keys must have shape \(N, 4\), got \(4,\)"),
        (torch.zeros(3, 4, dtype=torch.int64), None, TypeError, "floating point, got torch.int64"),
        (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), ValueError, "takes no ids"),
    ],
)
def test_errors_name_what_came(keys, ids, error, words):
    with pytest.raises(error, match=words):
        MemoryQueue(8, 4).enqueue(keys, ids)


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        (None, ValueError, "needs ids"),
        (torch.zeros(2, dtype=torch.int64), ValueError, r"ids must have shape \(3,\), .* got \(2,\)"),
        (torch.zeros(3), TypeError, "integers, got torch.float32"),
        (torch.zeros(3, dtype=torch.bool), TypeError, "integers, got torch.bool"),
    ],
)
def test_errors_about_ids(ids, error, words):
    queue = MemoryQueue(8, 4, with_ids=True)
    with pytest.raises(error, match=words):
        queue.enqueue(torch.zeros(3, 4), ids)
    assert queue.filled == 0 and queue.pointer == 0


@pytest.mark.parametrize(("num_keys", "dim", "word"), [(0, 4, "num_keys"), (4, -1, "dim")])
def test_sizes_must_be_positive(num_keys, dim, word):
    with pytest.raises(ValueError, match=word):
        MemoryQueue(num_keys, dim)


def test_gather_works_alone_and_cuts_the_graph():
    rows = torch.randn(3, 2, requires_grad=True)
    gathered = gather_rows(rows)
    assert torch.equal(gathered, rows) and not gathered.requires_grad


def test_repr_shows_the_sizes():
    assert repr(MemoryQueue(8, 4)) == "MemoryQueue(num_keys=8, dim=4, with_ids=False)"


def test_minus_one_is_no_id():
    queue = MemoryQueue(4, 2, with_ids=True)
    queue.enqueue(torch.ones(2, 2), torch.tensor([7, -1]))
    assert queue.rows_of(torch.tensor([-1, 7])).tolist() == [-1, 0]


def test_a_queue_without_ids_knows_no_rows_of_them():
    with pytest.raises(ValueError, match="with_ids=False knows no ids"):
        MemoryQueue(4, 2).rows_of(torch.tensor([1]))
    with pytest.raises(TypeError, match=r"ids must be integers, got torch\.float32"):
        MemoryQueue(4, 2, with_ids=True).rows_of(torch.tensor([1.0]))
