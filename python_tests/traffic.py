"""Counts what torch.distributed's collectives bring to this rank."""

from contextlib import contextmanager

import torch.distributed as dist


class Traffic:
    """Bytes that came from other ranks, at least, and collectives."""

    def __init__(self):
        self.bytes, self.calls = 0, 0

    def add(self, count):
        self.bytes += count
        self.calls += 1


@contextmanager
def counted_traffic():
    """A `Traffic` of what happens inside; collectives that it does not know are an error."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    traffic, before = Traffic(), {name: getattr(dist, name) for name in dir(dist)}

    def all_reduce(tensor, **options):
        # Each part of it has to pass R - 1 ranks to be added up, and as many for all to know.
        traffic.add(tensor.nbytes * 2 * (ranks - 1) / ranks)
        return before["all_reduce"](tensor, **options)

    def all_gather(parts, tensor, **options):
        traffic.add(tensor.nbytes * (ranks - 1))
        return before["all_gather"](parts, tensor, **options)

    def all_to_all_single(output, rows, received, sent, **options):
        row = output[0].nbytes if len(output) else 0
        traffic.add(row * (sum(received) - received[rank]))
        return before["all_to_all_single"](output, rows, received, sent, **options)

    def unknown(*_, **__):
        raise AssertionError("a collective whose traffic is not counted")

    others = ("broadcast", "gather", "scatter", "reduce", "all_to_all", "reduce_scatter", "all_gather_into_tensor")
    counting = {"all_reduce": all_reduce, "all_gather": all_gather, "all_to_all_single": all_to_all_single}
    replaced = counting | dict.fromkeys((*others, "all_gather_object", "send", "recv"), unknown)
    for name, function in replaced.items():
        setattr(dist, name, function)
    try:
        yield traffic
    finally:
        for name in replaced:
            setattr(dist, name, before[name])
