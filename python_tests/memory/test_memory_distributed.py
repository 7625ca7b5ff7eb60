import torch

from iecl_fast.memory import MemoryBank, MemoryQueue, gather_rows
from ranks import run_on_ranks

SIZES = [(3, 3), (2, 4), (1, 0), (0, 0)]  # rows of rank 0 and of rank 1 in each step


def enqueue_steps(rank):
    queue = MemoryQueue(7, 2, with_ids=True)
    queue.keys.zero_()
    queue.enqueue(*rows_of_step(0)[rank])
    state = {name: buffer.clone() for name, buffer in queue.state_dict().items()}
    for step in range(1, len(SIZES)):
        queue.enqueue(*rows_of_step(step)[rank])
    images = gather_rows(torch.full((rank + 1, 1, 2, 2), float(rank)))
    return {"state": state, "last": queue.state_dict(), "images": images}


def rows_of_step(step):
    """Keys and ids of both ranks, numbered through all steps in rank order."""
    start = sum(map(sum, SIZES[:step]))
    ids = torch.arange(start, start + sum(SIZES[step])).split(SIZES[step])
    return [(part.float()[:, None].expand(-1, 2), part) for part in ids]


def test_ranks_hold_the_same_queue_in_rank_order(tmp_path):
    results = run_on_ranks(enqueue_steps, tmp_path)

    for result in results:
        assert result["state"]["ids"].tolist() == [0, 1, 2, 3, 4, 5, -1]
        assert result["state"]["keys"][:, 0].tolist() == [0, 1, 2, 3, 4, 5, 0]
        # Then 6..11 and 12, whatever each rank brought.
        last = result["last"]
        assert torch.roll(last["ids"], -int(last["pointer"])).tolist() == [6, 7, 8, 9, 10, 11, 12]
        assert torch.equal(last["keys"][:, 1], last["ids"].float())
        assert last["filled"] == 7 and last["pointer"] == 13 % 7
        assert result["images"][:, 0, 0, 0].tolist() == [0, 1, 1]

    # A change of the number of ranks: one process continues from the state of two.
    queue = MemoryQueue(7, 2, with_ids=True)
    queue.load_state_dict(results[1]["state"])
    for step in range(1, len(SIZES)):
        keys, ids = zip(*rows_of_step(step), strict=True)
        queue.enqueue(torch.cat(keys), torch.cat(ids))
    assert torch.equal(queue.keys, results[0]["last"]["keys"])


INDEX = torch.tensor([4, 1, 4, 0, 1, 1, 3])  # 1 and 4 come on both ranks


def update_bank(rank):
    bank = first_bank()
    part = slice(0, 4) if rank == 0 else slice(4, None)
    bank.update(bank_keys()[part], INDEX[part])
    bank.update(bank_keys()[: 2 * rank], INDEX[: 2 * rank])  # rank 0 brings nothing
    return bank.keys


def first_bank():
    torch.manual_seed(0)
    return MemoryBank(5, 3, momentum=0.5)


def bank_keys():
    return torch.randn(7, 3, generator=torch.Generator().manual_seed(1))


def test_ranks_hold_the_same_bank_as_one_process(tmp_path):
    results = run_on_ranks(update_bank, tmp_path)
    bank = first_bank()
    bank.update(bank_keys(), INDEX)
    bank.update(bank_keys()[:2], INDEX[:2])
    assert all(torch.equal(result, bank.keys) for result in results)
