"""Ranks as threads of one process: many small collectives in little time. What real processes do is tested beside."""

import threading

import torch

from iecl_fast.exchange import Exchange
from iecl_fast.ring import sharded


class ThreadExchange(Exchange):
    """The same collectives by a board that all threads see. Counts what a rank receives from others."""

    def __init__(self, rank, size, board, barrier):
        self.rank, self.size, self.board, self.barrier = rank, size, board, barrier

    def _all(self, value):
        self.board[self.rank] = value
        self.barrier.wait()
        values = list(self.board)
        self.barrier.wait()
        return values

    def total(self, integers):
        assert not integers.is_floating_point()
        return torch.stack(self._all(integers)).sum(dim=0).to(integers.dtype)

    def stack(self, part):
        return torch.stack(self._all(part))

    def route(self, rows, sent, received):
        assert sum(sent) == len(rows)
        parts = [parts[self.rank] for parts in self._all(rows.split(sent))]
        assert [len(part) for part in parts] == received
        return torch.cat(parts)


def run_on_threads(monkeypatch, function, size):
    """What ``function(rank)`` returned on each of ``size`` ranks, in a list; an error of any is raised."""
    board, barrier = [None] * size, threading.Barrier(size, timeout=60)
    local, results = threading.local(), [None] * size
    monkeypatch.setattr(sharded, "Exchange", lambda group: local.exchange)

    def run(rank):
        local.exchange = ThreadExchange(rank, size, board, barrier)
        try:
            results[rank] = function(rank)
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:  # not those of threads that only waited
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return results
