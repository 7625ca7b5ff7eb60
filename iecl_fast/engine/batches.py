"""The order in which a run sees its images: a pure function of seed, epoch and position."""

import itertools

import torch
from torch.utils.data import Sampler


class EpochBatches(Sampler):
    """The batches of one epoch, as lists of indices, from a position on.

    The order is a permutation drawn from (seed, epoch) alone, so a run resumed in the middle of an epoch goes on with
    the batch that comes next. A short batch at the end is left out, unless it is the only one. With several ranks every
    rank takes its part of each batch, the first the first: the batches do not depend on the number of ranks, and rows
    that are gathered in rank order are in the batch's order. (Of a data set that is smaller than a batch, ranks that
    cannot share it equally leave up to ``world_size - 1`` images out.)

    Args:
        num_samples: images in the data set, at least 1.
        batch_size: images of a batch, all ranks together; a multiple of `world_size`.
        seed, epoch: ints >= 0.
        start: batches to leave out at the beginning.
        rank, world_size: which part, of how many.
    """

    def __init__(self, num_samples, batch_size, *, seed, epoch, start=0, rank=0, world_size=1):
        self.num_samples = num_samples
        self.batch_size = min(batch_size, num_samples // world_size * world_size)
        self.seed = seed
        self.epoch = epoch
        self.start = start
        self.rank = rank
        self.world_size = world_size

    def __iter__(self):
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        part = self.batch_size // self.world_size
        for batch in range(self.start, self.start + len(self)):
            first = batch * self.batch_size + self.rank * part
            yield order[first : first + part].tolist()

    def __len__(self):
        return self.num_samples // self.batch_size - self.start


def mixed_seed(seed, epoch):
    """One 63-bit seed for each pair, so that epoch 1 of seed 0 is not epoch 0 of seed 1."""
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 1) % 2**63


def grouped(iterable, size):
    """Lists of `size` consecutive items; fewer items at the end are left out."""
    iterator = iter(iterable)
    while len(group := list(itertools.islice(iterator, size))) == size:
        yield group
