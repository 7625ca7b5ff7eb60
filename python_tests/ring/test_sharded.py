"""Rings over keys that are spread over ranks are those of one process that holds all keys."""

import pytest
import torch

from accuracy import assert_as_accurate
from iecl_fast import ring_sample
from iecl_fast.ring import agreement, reference, shard, sharded
from ring.cases import DTYPES, KINDS, query_and_keys
from ring.test_info_nce import plain_loss
from ring.threaded_ranks import run_on_threads

RINGS = ((0, 100), (90, 99), (0, 50), (20, 21), (55, 100))
# Keys of each rank: even, uneven, ranks without keys, and enough for sampling.
SPREADS = ((150, 150), (100, 0, 199, 1), (0, 2, 0, 1), (4500, 20, 4480))


def spread_out(tensor, sizes):
    return tensor.split(list(sizes))


def queries_of(n, ranks):
    """Rows of each rank; the last has none if there are more than two."""
    counts = [n // ranks] * ranks
    if ranks > 2:
        counts[-1] = 0
    counts[0] += n - sum(counts)
    return counts


def bits(values):
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def draw(function, query, keys, ring, exclude, seed, **options):
    generator = torch.Generator().manual_seed(seed)
    return function(query, keys, *ring, exclude=exclude, generator=generator, return_indices=True, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SPREADS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_draws_the_keys_that_one_process_draws(kind, sizes, dtype, monkeypatch):
    k = sum(sizes)
    query, keys = query_and_keys(kind, 7, k, 6, dtype)
    counts = queries_of(7, len(sizes))
    excludes = (None, torch.randint(-1, k, (7,)), torch.full((7,), k - 1))
    for ring in RINGS if k > 20 else ((0, 100), (20, 80)):
        for exclude in excludes:
            part = (lambda rank: None) if exclude is None else spread_out(exclude, counts).__getitem__

            def on_rank(rank, ring=ring, part=part):
                own = spread_out(query, counts)[rank], spread_out(keys, sizes)[rank]
                return draw(sharded.ring_sample, *own, ring, part(rank), rank, num_samples=60)

            for rank, (values, indices) in enumerate(run_on_threads(monkeypatch, on_rank, len(sizes))):
                own = spread_out(query, counts)[rank]
                expected = draw(ring_sample, own, keys, ring, part(rank), rank, num_samples=60)
                assert torch.equal(indices, expected[1])
                assert torch.equal(bits(values), bits(expected[0])) and values.dtype == dtype


@pytest.mark.parametrize("sizes", SPREADS[:2] + SPREADS[3:], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_ring_is_the_same_set(kind, sizes, monkeypatch):
    """All of it, not what happens to be drawn: each rank's share of it, found by its local ranks."""
    query, keys = query_and_keys(kind, 6, sum(sizes), 6, torch.float32)
    exclude = torch.tensor([-1, 0, 99, 100, 149, sum(sizes) - 1])
    masks = []

    def local_ranks(query, keys, exclude, *arguments):
        ranks = agreement.local_ranks(query, keys, exclude, *arguments)
        if len(keys):
            candidates = torch.arange(len(keys)) != exclude[:, None]
            similarities = ring_sample(query, keys, 0, 100)
            masks.append((arguments[-1].rank, shard._members(similarities, candidates, ranks)))
        return ranks

    monkeypatch.setattr(sharded, "local_ranks", local_ranks)
    similarities = ring_sample(query, keys, 0, 100)
    for ring in RINGS:
        masks.clear()

        def on_rank(rank, ring=ring):
            own = query if rank == 0 else query[:0]
            excluded = exclude if rank == 0 else exclude[:0]
            keys_here = spread_out(keys, sizes)[rank]
            sharded.ring_sample(own, keys_here, *ring, exclude=excluded, num_samples=1)

        run_on_threads(monkeypatch, on_rank, len(sizes))
        mask = torch.cat([mask for _, mask in sorted(masks, key=lambda item: item[0])], dim=1)
        assert torch.equal(mask, reference.member_mask(similarities, *ring, exclude))


def losses_and_gradients(loss, inputs, weights):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    values = loss(*leaves)
    return values.detach(), *torch.autograd.grad((values * weights.to(values.dtype)).sum(), leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SPREADS[:2] + SPREADS[3:], ids=str)
@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_loss_is_as_accurate_as_plain_pytorch(ring, sizes, dtype, monkeypatch):
    query, keys = query_and_keys("unit", 8, sum(sizes), 20, dtype)
    positive_key = torch.nn.functional.normalize(query.float() + torch.randn(8, 20) / 4, dim=1).to(dtype)
    temperature, weights = torch.tensor(0.2), torch.rand(8) + 0.5
    counts = queries_of(8, len(sizes))

    def on_rank(rank):
        own = [spread_out(tensor, counts)[rank] for tensor in (query, positive_key)]
        here = spread_out(keys, sizes)[rank]
        options = {"lower": ring[0], "upper": ring[1], "reduction": "none"}
        return losses_and_gradients(
            lambda q, p, t: sharded.ring_info_nce(q, p, here, temperature=t, **options),
            (*own, temperature),
            spread_out(weights, counts)[rank],
        )

    of_ranks = run_on_threads(monkeypatch, on_rank, len(sizes))
    assert all(map(torch.equal, sum(run_on_threads(monkeypatch, on_rank, len(sizes)), ()), sum(of_ranks, ())))
    loss, query_gradient, positive_gradient, temperature_gradient = zip(*of_ranks)
    result = torch.cat(loss), torch.cat(query_gradient), torch.cat(positive_gradient), sum(temperature_gradient)

    mask = reference.member_mask(reference.similarity(query, keys), *ring)
    inputs = query, positive_key, temperature

    def plain(inputs, keys):
        return losses_and_gradients(lambda q, p, t: plain_loss(q, p, keys, t, mask), inputs, weights)

    expected, in_dtype = plain([tensor.double() for tensor in inputs], keys.double()), plain(inputs, keys)
    for name, *values in zip(("loss", "query", "positive_key", "temperature"), result, expected, in_dtype):
        assert values[1].abs().max() > 1e-3, f"{name} does not depend on the ring"
        assert_as_accurate(*values)
    assert result[0].dtype == torch.float32 and result[1].dtype == dtype
