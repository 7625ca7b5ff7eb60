"""Any sequence of calls to the stores of keys, against plain Python lists."""

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fuzz import DTYPES, laid_out, values
from iecl_fast import MemoryBank, MemoryQueue

KEY_DTYPES = (*DTYPES, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16)


def same(one, other):
    """Equal, NaN where NaN."""
    return torch.equal(one.nan_to_num(7.0, 8.0, 9.0), other.nan_to_num(7.0, 8.0, 9.0))


def saved_and_loaded(module, fresh):
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


class Queue(RuleBasedStateMachine):
    """All keys that ever came, in order: the queue is the last of them."""

    @initialize(num_keys=st.integers(1, 9), dim=st.integers(1, 3), with_ids=st.booleans())
    def build(self, num_keys, dim, with_ids):
        self.size = {"num_keys": num_keys, "dim": dim, "with_ids": with_ids}
        self.queue = MemoryQueue(**self.size)
        self.rows = list(self.queue.keys.clone())
        self.ids = [-1] * num_keys
        self.count = 0

    @rule(data=st.data())
    def enqueue(self, data):
        n = data.draw(st.integers(0, 2 * self.size["num_keys"] + 3))
        keys = data.draw(values((n, self.size["dim"]), data.draw(st.sampled_from(KEY_DTYPES))))
        keys = data.draw(laid_out(keys))
        ids = None
        if self.size["with_ids"]:
            ids = torch.tensor(data.draw(st.lists(st.integers(0, 12), min_size=n, max_size=n)), dtype=torch.int64)
            ids = data.draw(laid_out(ids.to(data.draw(st.sampled_from(INTEGERS))), expand=n > 0))
        self.queue.enqueue(keys, ids)
        self.rows += list(keys.float())
        self.ids += [-1] * n if ids is None else ids.tolist()
        self.count += n

    @rule(ids=st.lists(st.integers(-1, 14), max_size=6))
    def find(self, ids):
        if not self.size["with_ids"]:
            return
        k = self.size["num_keys"]
        last = self.ids[-k:]
        newest = {wanted: place for place, wanted in enumerate(last) if wanted >= 0}
        expected = [(self.count + newest[wanted]) % k if wanted in newest else -1 for wanted in ids]
        found = self.queue.rows_of(torch.tensor(ids, dtype=torch.int64))
        assert [row if wanted >= 0 else -1 for row, wanted in zip(found.tolist(), ids)] == expected

    @rule()
    def save_and_load(self):
        self.queue = saved_and_loaded(self.queue, MemoryQueue(**self.size))

    @rule()
    def copy(self):
        self.queue = copy.deepcopy(self.queue)

    @rule(data=st.data())
    def refuse(self, data):
        """What is refused leaves no trace; the invariant looks."""
        dim, with_ids = self.size["dim"], self.size["with_ids"]
        keys, ids = data.draw(
            st.sampled_from(
                [
                    (torch.ones(2, dim + 1), torch.zeros(2, dtype=torch.int64) if with_ids else None),
                    (torch.ones(2, dim, dtype=torch.int64), torch.zeros(2, dtype=torch.int64) if with_ids else None),
                    (torch.ones(dim), torch.zeros(1, dtype=torch.int64) if with_ids else None),
                    (torch.ones(2, dim), None if with_ids else torch.zeros(2, dtype=torch.int64)),
                    (torch.ones(2, dim), torch.zeros(3, dtype=torch.int64)),
                    (torch.ones(2, dim), torch.zeros(2)),
                ]
            )
        )
        with pytest.raises((ValueError, TypeError)):
            self.queue.enqueue(keys, ids)

    @invariant()
    def holds_the_last_keys(self):
        k = self.size["num_keys"]
        assert int(self.queue.pointer) == self.count % k and int(self.queue.filled) == min(self.count, k)
        assert same(self.queue.keys.roll(-int(self.queue.pointer), 0), torch.stack(self.rows[-k:]))
        if self.size["with_ids"]:
            assert self.queue.ids.roll(-int(self.queue.pointer)).tolist() == self.ids[-k:]


class Bank(RuleBasedStateMachine):
    """Entries one by one: an index moves once, from what it was before the batch, towards its last key."""

    @initialize(num_items=st.integers(1, 9), dim=st.integers(1, 4), momentum=st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    def build(self, num_items, dim, momentum):
        self.size = {"num_items": num_items, "dim": dim, "momentum": momentum}
        self.bank = MemoryBank(**self.size)
        self.entries = self.bank.keys.clone()

    @rule(data=st.data())
    def update(self, data):
        n = data.draw(st.integers(0, 12))
        indices = st.integers(0, self.size["num_items"] - 1)
        index = torch.tensor(data.draw(st.lists(indices, min_size=n, max_size=n)), dtype=torch.int64)
        index = data.draw(laid_out(index.to(data.draw(st.sampled_from(INTEGERS)))))
        keys = data.draw(values((n, self.size["dim"]), data.draw(st.sampled_from(KEY_DTYPES))))
        if n and data.draw(st.booleans()):
            keys = -self.entries[index.long()]  # no direction is left of a mixture half and half
        keys = data.draw(laid_out(keys))
        before = self.entries
        self.bank.update(keys, index)
        self.entries = self.bank.keys.clone()
        last = dict(zip(index.tolist(), keys.float()))
        for item, entry in enumerate(self.entries):
            if item not in last:
                assert torch.equal(entry, before[item])
                continue
            mixture = self.size["momentum"] * before[item].double() + (1 - self.size["momentum"]) * last[item].double()
            norm = mixture.norm()
            if not mixture.isfinite().all() or norm < 1e-13:
                assert torch.equal(entry, before[item])
            elif 1e-11 < norm < 1e18:
                rounding = 2.0**-22 * max(1.0, float(before[item].double().norm() / norm))
                assert (entry.double() - mixture / norm).abs().max() <= rounding

    @rule(data=st.data())
    def look_up(self, data):
        index = torch.tensor(
            data.draw(st.lists(st.integers(0, self.size["num_items"] - 1), max_size=6)), dtype=torch.int64
        )
        assert torch.equal(self.bank.entries(index), self.entries[index])

    @rule()
    def save_and_load(self):
        self.bank = saved_and_loaded(self.bank, MemoryBank(**self.size))

    @rule(data=st.data())
    def refuse(self, data):
        k, dim = self.size["num_items"], self.size["dim"]
        keys, index = data.draw(
            st.sampled_from(
                [
                    (torch.ones(1, dim), torch.tensor([k])),
                    (torch.ones(2, dim), torch.tensor([0, -1])),
                    (torch.ones(2, dim), torch.tensor([0])),
                    (torch.ones(1, dim), torch.tensor([0.0])),
                    (torch.ones(1, dim + 1), torch.tensor([0])),
                    (torch.ones(1, dim, dtype=torch.int32), torch.tensor([0])),
                ]
            )
        )
        with pytest.raises((ValueError, TypeError)):
            self.bank.update(keys, index)

    @invariant()
    def all_entries_are_unit_rows(self):
        assert torch.equal(self.bank.keys, self.entries)
        torch.testing.assert_close(self.entries.norm(dim=1), torch.ones(self.size["num_items"]))


TestQueue = Queue.TestCase
TestBank = Bank.TestCase


@given(st.data())
def test_a_queue_of_any_rows_gives_the_ring_the_same_as_a_list(data):
    """The keys a query must not meet are found by their ids, wherever the pointer stands."""
    from iecl_fast import ring_sample

    k, sizes = data.draw(st.integers(2, 9)), data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    queue = MemoryQueue(k, 3, with_ids=True)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    for number, size in enumerate(sizes):
        queue.enqueue(torch.randn(size, 3, generator=generator), torch.arange(size) + 100 * number)
    ids = torch.arange(sizes[-1]) + 100 * (len(sizes) - 1)
    exclude = queue.rows_of(ids)
    query = torch.randn(len(ids), 3, generator=generator)
    drawn = ring_sample(query, queue.keys, 0, 100, num_samples=20, exclude=exclude, return_indices=True, layout="KC")[1]
    assert not (queue.ids[drawn] == ids[:, None]).any()
