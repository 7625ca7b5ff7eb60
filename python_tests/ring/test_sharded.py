"""Rings over keys that are spread over ranks are those of one process that holds all keys."""

import os
import subprocess
import sys

import pytest
import torch

from accuracy import assert_as_accurate, joined
from iecl_fast import ring_sample
from iecl_fast.ring import agreement, reference, shard, sharded
from ring.cases import DTYPES, KINDS, query_and_keys
from ring.loss_checks import losses_and_gradients, plain_loss
from ring.threaded_ranks import run_on_threads

NO_KERNELS = pytest.mark.filterwarnings("ignore:iecl_fast.ring.sharded has no kernel")
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


def assert_draws_alike(monkeypatch, query, keys, sizes, ring, exclude):
    counts = queries_of(len(query), len(sizes))
    excludes = [None] * len(sizes) if exclude is None else spread_out(exclude, counts)
    queries = spread_out(query, counts)

    def on_rank(rank):
        here = spread_out(keys, sizes)[rank]
        return draw(sharded.ring_sample, queries[rank], here, ring, excludes[rank], rank, num_samples=60)

    for rank, (values, indices) in enumerate(run_on_threads(monkeypatch, on_rank, len(sizes))):
        expected = draw(ring_sample, queries[rank], keys, ring, excludes[rank], rank, num_samples=60)
        assert torch.equal(indices, expected[1])
        assert torch.equal(bits(values), bits(expected[0])) and values.dtype == query.dtype


@pytest.mark.parametrize("sizes", SPREADS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_draws_the_keys_that_one_process_draws(kind, sizes, monkeypatch):
    """Those of the same random numbers, to the bit; the dtypes in turn."""
    k = sum(sizes)
    for number, ring in enumerate(RINGS if k > 20 else ((0, 100), (20, 80), (50, 100))):
        query, keys = query_and_keys(kind, 7, k, 6, DTYPES[number % 3])
        for exclude in (None, torch.randint(-1, k, (7,))):
            assert_draws_alike(monkeypatch, query, keys, sizes, ring, exclude)


def test_a_similarity_has_the_same_bits_on_any_rank():
    """A key has the same similarity to the bit, wherever it lies among others."""
    for channels in (3, 64, 200):
        query, keys = query_and_keys("random", 9, 1500, channels, torch.float32)
        whole = ring_sample(query, keys, 0, 100)
        for sizes in ((1, 1499), (577, 48, 875), (700, 13, 1, 786)):
            parts = [ring_sample(query, part, 0, 100) for part in keys.split(list(sizes))]
            assert torch.equal(torch.cat(parts, dim=1), whole)
            sample = shard.sample(query, keys[-sizes[-1] :], min(sizes[-1], 193))
            assert (sample[:, :, None] == whole[:, None, -sizes[-1] :]).any(dim=2).all()


def some_similarities():
    generator = torch.Generator().manual_seed(0)
    return ring_sample(torch.randn(9, 200, generator=generator), torch.randn(700, 200, generator=generator), 0, 100)


def test_avx2_and_avx512_agree(tmp_path):
    """So that the machines of ranks need not be alike."""
    if torch.ops.iecl_fast._instruction_set() != "avx512":
        pytest.skip("this machine has no AVX-512")
    code = "import sys, torch; from ring.test_sharded import some_similarities as s; torch.save(s(), sys.argv[1])"
    environment = {**os.environ, "IECL_FAST_ISA": "avx2", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, tmp_path / "avx2.pt"], check=True, env=environment)
    assert torch.equal(torch.load(tmp_path / "avx2.pt"), some_similarities())


def test_windows_that_miss_are_noticed(monkeypatch):
    """Too narrow ones: their queries come again with wider windows, in the end with all keys."""
    attempts = []

    def attempt(part, boundaries, totals, open_, deviations, *rest):
        found, sure = original(part, boundaries, totals, open_, deviations, *rest)
        attempts.append((deviations, len(sure), int(sure.sum())))
        return found, sure

    original = agreement._attempt
    monkeypatch.setattr(agreement, "_attempt", attempt)
    monkeypatch.setattr(agreement, "UNSAMPLED", 100)
    monkeypatch.setattr(agreement, "DEVIATIONS", (0.0, 0.2))
    query, keys = query_and_keys("unit", 60, 60_000, 6, torch.float32)
    assert_draws_alike(monkeypatch, query, keys, (40_000, 20_000), (40, 60), None)
    assert {deviations for deviations, _, _ in attempts} == {0.0, 0.2, None}
    assert all(sure == count for deviations, count, sure in attempts if deviations is None)


@NO_KERNELS
@pytest.mark.parametrize("sizes", [(2000, 3, 0, 2500), (6, 0, 5)], ids=str)
@pytest.mark.parametrize("kind", ["ties", "signed_zeros", "infinite", "nan", "sorted", "constant"])
def test_plain_pytorch_for_devices_without_kernels(kind, sizes, monkeypatch):
    """What a GPU does. Similarities of these kinds have no rounding."""
    monkeypatch.setattr(shard, "_has_kernels", lambda tensor: False)
    monkeypatch.setattr(shard, "PLAIN_BYTES", 4 * 2500 * 3)  # rows in several parts
    monkeypatch.setattr(agreement, "UNSAMPLED", 100)
    query, keys = query_and_keys(kind, 7, sum(sizes), 6, torch.float32)
    exclude = torch.randint(-1, sum(sizes), (7,))
    rings = RINGS if sum(sizes) > 20 else ((0, 100), (20, 80))
    for ring in rings:
        assert_draws_alike(monkeypatch, query, keys, sizes, ring, exclude)


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


@NO_KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("sizes", "has_kernels"), [(SPREADS[1], True), (SPREADS[1], False), (SPREADS[3], True)], ids=str
)
@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_loss_is_as_accurate_as_plain_pytorch(ring, sizes, has_kernels, dtype, monkeypatch):
    monkeypatch.setattr(shard, "_has_kernels", lambda tensor: has_kernels)
    runs = zip(*(losses_ours_exact_and_plain(ring, sizes, dtype, monkeypatch) for _ in range(8)))
    for name, *values in zip(("loss", "query", "positive_key", "temperature"), *map(joined, runs), strict=True):
        assert values[0].dtype == (torch.float32 if name in ("loss", "temperature") else dtype)
        assert values[1].abs().max() > 1e-3, f"{name} does not depend on the ring"
        assert_as_accurate(*values)


def losses_ours_exact_and_plain(ring, sizes, dtype, monkeypatch):
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

    return result, plain([tensor.double() for tensor in inputs], keys.double()), plain(inputs, keys)


def test_draws_have_the_gradient_of_one_process(monkeypatch):
    query, keys = query_and_keys("unit", 6, 303, 6, torch.float32)
    keys[7] = torch.inf  # drawn, it makes the gradient infinite, not NaN
    weights = torch.rand(6, 50)
    sizes, counts = (100, 0, 200, 3), queries_of(6, 4)

    def gradient(function, query, keys, weights, seed):
        leaf = query.clone().requires_grad_()
        generator = torch.Generator().manual_seed(seed)
        values = function(leaf, keys, 20, 100, num_samples=50, generator=generator)
        return torch.autograd.grad((values * weights).sum(), leaf)[0]

    def on_rank(rank):
        own = [spread_out(tensor, counts)[rank] for tensor in (query, weights)]
        return gradient(sharded.ring_sample, own[0], spread_out(keys, sizes)[rank], own[1], rank)

    for rank, result in enumerate(run_on_threads(monkeypatch, on_rank, len(sizes))):
        own = [spread_out(tensor, counts)[rank] for tensor in (query, weights)]
        expected = gradient(ring_sample, own[0], keys, own[1], rank)
        torch.testing.assert_close(result, expected)


def test_nothing_in_no_ring(monkeypatch):
    """A shard may hold no key of the ring; all together have to."""
    keys = torch.ones(6, 2)

    def on_rank(rank):
        sharded.ring_info_nce(keys[:2], keys[:2], keys[: 3 * rank], lower=90, upper=99)

    with pytest.raises(ValueError, match="with 3 candidate keys both fall on rank 3"):
        run_on_threads(monkeypatch, on_rank, 2)


def test_an_excluded_key_that_is_none_is_an_error_on_all_ranks(monkeypatch):
    keys, messages = torch.ones(6, 2), []

    def on_rank(rank):
        with pytest.raises(ValueError) as caught:
            sharded.ring_sample(keys[:1], keys[:3], 0, 100, num_samples=1, exclude=torch.tensor([6 * rank]))
        messages.append(str(caught.value))

    run_on_threads(monkeypatch, on_rank, 2)
    assert len(messages) == 2 and all("exclude contains 6" in message for message in messages)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"local_keys": torch.ones(4, 2, requires_grad=True)}, ValueError, "local_keys requires a gradient"),
        ({"local_keys": torch.ones(4, 3)}, ValueError, r"local_keys has the shape \(4, 3\)"),
        ({"local_keys": torch.ones(4, 2).half()}, TypeError, "local_keys is torch.float16"),
        (dict.fromkeys(("query", "positive_key", "local_keys"), torch.ones(4, 2).double()), TypeError, "torch.float64"),
        ({"positive_key": torch.ones(2, 2)}, ValueError, r"positive_key has the shape \(2, 2\)"),
        ({"lower": 50, "upper": 50}, ValueError, "lower has to be less than upper"),
        ({"temperature": 0.0}, ValueError, "temperature = 0.0 is not allowed"),
        ({"reduction": "median"}, ValueError, "reduction = 'median'"),
        ({"exclude": torch.zeros(2, dtype=torch.int64)}, ValueError, r"exclude has the shape \(2,\)"),
    ],
)
def test_errors_name_what_came(options, error, words):
    arguments = {"query": torch.ones(3, 2), "positive_key": torch.ones(3, 2), "local_keys": torch.ones(4, 2)}
    with pytest.raises(error, match=words):
        sharded.ring_info_nce(**(arguments | options))
    with pytest.raises(ValueError, match="num_samples = 0 is not allowed"):
        sharded.ring_sample(torch.ones(3, 2), torch.ones(4, 2), 0, 100, num_samples=0)


def test_no_second_derivative():
    query = torch.randn(3, 4, requires_grad=True)
    loss = sharded.ring_info_nce(query, torch.randn(3, 4), torch.randn(20, 4))
    draws = sharded.ring_sample(query, torch.randn(20, 4), 20, 80, num_samples=3).square().sum()
    for name, value in (("ring_info_nce", loss), ("ring_sample", draws)):
        (gradient,) = torch.autograd.grad(value, query, create_graph=True)
        with pytest.raises(RuntimeError, match=f"sharded.{name} has no second derivative"):
            gradient.sum().backward()


def test_reductions_and_no_queries():
    query, keys = query_and_keys("unit", 8, 500, 16, torch.float32)
    none = sharded.ring_info_nce(query, query.flip(0), keys, reduction="none")
    assert torch.equal(sharded.ring_info_nce(query, query.flip(0), keys, reduction="sum"), none.sum())
    assert torch.equal(sharded.ring_info_nce(query, query.flip(0), keys), none.mean())
    empty = query[:0].clone().requires_grad_()
    sharded.ring_info_nce(empty, query[:0], keys, reduction="sum").backward()
    assert empty.grad.shape == (0, 16)
    assert sharded.ring_sample(query[:0], keys, 10, 90, num_samples=3).shape == (0, 3)
