import pytest
import torch

from accuracy import assert_as_accurate, joined
from iecl_fast import ring_sample
from iecl_fast.ring import reference, ring_ranks
from ring.cases import DTYPES, KINDS, layouts, query_and_keys
from torch_threads import torch_threads

PERCENTILES = ((0, 100), (90, 99), (0, 50), (50, 100), (33.3, 33.8))


def stable_sort_set(similarities, lower, upper):
    first, end = ring_ranks(lower, upper, similarities.shape[1])
    return similarities.argsort(dim=1, stable=True)[:, first:end].sort(dim=1).values


def all_similarities(query, keys):
    """The kernel's own, in float32 and key order: what it has to rank."""
    similarities, indices = ring_sample(query.float(), keys.float(), 0, 100, return_indices=True)
    assert torch.equal(indices, torch.arange(keys.shape[0]).expand_as(indices))
    return similarities


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_set_of_a_stable_sort(kind, dtype):
    query, keys = query_and_keys(kind, 9, 700, 24, dtype)
    similarities = all_similarities(query, keys)
    for lower, upper in PERCENTILES:
        values, indices = ring_sample(query, keys, lower, upper, return_indices=True)
        assert torch.equal(indices, stable_sort_set(similarities, lower, upper))
        assert torch.equal(values.nan_to_num(7), similarities.gather(1, indices).to(dtype).nan_to_num(7))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("random", "unit", "huge")])
def test_similarities_are_exact_where_float32_is(kind):
    query, keys = query_and_keys(kind, 9, 700, 24, torch.float32)
    assert torch.equal(all_similarities(query, keys).nan_to_num(7), (query @ keys.T).nan_to_num(7))


@pytest.mark.parametrize("kind", KINDS)
def test_large_queue_takes_brackets_and_agrees(kind):
    """More keys than are recorded whole: the boundaries come from a sample and a census."""
    query, keys = query_and_keys(kind, 5, 20_011, 16, torch.float32)
    similarities = all_similarities(query, keys)
    for lower, upper in (*PERCENTILES, (0.01, 99.99), (99.9, 100)):
        indices = ring_sample(query, keys, lower, upper, return_indices=True)[1]
        assert torch.equal(indices, stable_sort_set(similarities, lower, upper))


@pytest.mark.parametrize("kind", ["unit", "constant"])
def test_many_queries_record_more_than_a_piece(kind):
    """Of equal keys those about the boundaries' indices are recorded, all in few chunks."""
    query, keys = query_and_keys(kind, 256, 20_000, 4, torch.float32)
    similarities = all_similarities(query, keys)
    indices = ring_sample(query, keys, 90, 99, return_indices=True)[1]
    assert torch.equal(indices, stable_sort_set(similarities, 90, 99))


def test_wide_ring_of_many_queries_takes_two_passes():
    query, keys = query_and_keys("ties", 40, 150_000, 4, torch.float32)
    similarities = all_similarities(query, keys)
    indices = ring_sample(query, keys, 2, 97, return_indices=True)[1]
    assert torch.equal(indices, stable_sort_set(similarities, 2, 97))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(3, 77, 13), (8, 5000, 40)], ids=str)
def test_layouts_agree(dtype, size):
    query, keys = query_and_keys("random", *size, dtype)
    expected = ring_sample(query, keys, 20, 80, return_indices=True)
    strided_query = torch.stack([query, query + 1], dim=2)[:, :, 0]
    for name, (stored, arguments) in layouts(keys).items():
        for some_query in (query, strided_query, query.T.contiguous().T):
            values, indices = ring_sample(some_query, stored, 20, 80, return_indices=True, **arguments)
            assert torch.equal(indices, expected[1]), name
            assert torch.equal(values, expected[0]), name


def test_layout_is_seen_from_the_shape():
    query, keys = query_and_keys("random", 4, 30, 6, torch.float32)
    assert torch.equal(ring_sample(query, keys.T, 10, 90), ring_sample(query, keys, 10, 90))
    square = torch.randn(6, 6)
    assert torch.equal(ring_sample(query, square, 0, 100), ring_sample(query, square, 0, 100, layout="KC"))
    assert not torch.equal(ring_sample(query, square, 0, 100), ring_sample(query, square, 0, 100, layout="CK"))


@pytest.mark.parametrize("kind", ["random", "ties", "constant", "nan", "infinite"])
@pytest.mark.parametrize("k", [301, 9001])
def test_excluded_key_is_no_candidate(kind, k):
    query, keys = query_and_keys(kind, 7, k, 12, torch.float32)
    exclude = torch.tensor([0, 1, k // 2, k - 1, 17, 100, 200])
    similarities = all_similarities(query, keys)
    for lower, upper in PERCENTILES:
        _, indices = ring_sample(query, keys, lower, upper, exclude=exclude, return_indices=True)
        for row, own in enumerate(exclude.tolist()):
            others = torch.cat([torch.arange(own), torch.arange(own + 1, k)])
            expected = others[stable_sort_set(similarities[row, others][None], lower, upper)[0]]
            assert torch.equal(indices[row], expected)


def test_excluding_nothing_is_not_excluding():
    query, keys = query_and_keys("random", 3, 50, 4, torch.float32)
    none = torch.full((3,), -1)
    assert torch.equal(ring_sample(query, keys, 10, 90, exclude=none), ring_sample(query, keys, 10, 90))


@pytest.mark.parametrize("k", [500, 20_000])
def test_draws_are_members_and_uniform(k):
    query, keys = query_and_keys("random", 3, k, 8, torch.float32)
    members = ring_sample(query, keys, 90, 91, return_indices=True)[1]
    generator = torch.Generator().manual_seed(3)
    values, drawn = ring_sample(query, keys, 90, 91, num_samples=20_000, generator=generator, return_indices=True)
    assert torch.equal(values, all_similarities(query, keys).gather(1, drawn))
    for row in range(3):
        counts = torch.bincount(torch.searchsorted(members[row], drawn[row]), minlength=members.shape[1])
        assert torch.isin(drawn[row], members[row]).all()
        expected = 20_000 / members.shape[1]
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        degrees = members.shape[1] - 1
        assert abs(chi_squared - degrees) < 5 * (2 * degrees) ** 0.5
    again = ring_sample(query, keys, 90, 91, num_samples=20_000, generator=torch.Generator().manual_seed(3))
    assert torch.equal(values, again)


def test_draws_with_own_entry_excluded():
    query, keys = query_and_keys("ties", 4, 60, 6, torch.float32)
    exclude = torch.tensor([3, -1, 59, 0])
    drawn = ring_sample(query, keys, 0, 100, num_samples=4000, exclude=exclude, return_indices=True)[1]
    for row, own in enumerate(exclude.tolist()):
        assert set(drawn[row].tolist()) == set(range(60)) - {own}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_samples", [None, 50])
def test_gradients(dtype, num_samples):
    runs = zip(*(gradients_ours_exact_and_plain(dtype, num_samples) for _ in range(8)))
    for result, expected, plain in zip(*map(joined, runs), strict=True):
        assert result.dtype == dtype
        assert_as_accurate(result, expected, plain)


def gradients_ours_exact_and_plain(dtype, num_samples):
    query, keys = query_and_keys("unit", 6, 400, 20, dtype)
    weights = None
    gradients = []
    for cast in (lambda tensor: tensor, lambda tensor: tensor.double()):
        leaves = [cast(tensor).requires_grad_() for tensor in (query, keys)]
        if weights is None:
            generator = torch.Generator().manual_seed(0)
            values, indices = ring_sample(
                *leaves, 40, 90, num_samples=num_samples, generator=generator, return_indices=True
            )
            weights = torch.randn_like(values)
        else:
            values = (leaves[0] @ leaves[1].T).gather(1, indices)
        gradients.append(torch.autograd.grad((values * cast(weights)).sum(), leaves))
    plain_leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, keys)]
    plain = (plain_leaves[0] @ plain_leaves[1].T).gather(1, indices)
    return *gradients, torch.autograd.grad((plain * weights).sum(), plain_leaves)


def test_gradient_of_a_sum_has_no_strides():
    """loss.sum() hands over a gradient with stride 0."""
    query, keys = query_and_keys("random", 4, 50, 6, torch.float32)
    query.requires_grad_()
    ring_sample(query, keys, 0, 100).sum().backward()
    torch.testing.assert_close(query.grad, keys.sum(0).expand(4, 6))


def test_gradient_through_a_channel_major_queue():
    query, keys = query_and_keys("random", 4, 50, 6, torch.float32)
    queue = keys.T.contiguous().requires_grad_()
    ring_sample(query, queue, 0, 100).sum().backward()
    torch.testing.assert_close(queue.grad, query.sum(0)[:, None].expand(6, 50))


def test_no_queries():
    keys = torch.randn(30, 4)
    values, indices = ring_sample(torch.empty(0, 4), keys, 10, 90, return_indices=True)
    assert values.shape == indices.shape == (0, 24) and indices.dtype == torch.int64
    assert ring_sample(torch.empty(0, 4), keys, 10, 90, num_samples=5).shape == (0, 5)
    query = torch.empty(0, 4, requires_grad=True)
    ring_sample(query, keys, 10, 90).sum().backward()
    assert query.grad.shape == (0, 4)


@pytest.mark.parametrize("channels", [1, 7, 8, 16, 17, 300, 1000])
def test_any_number_of_channels(channels):
    query, keys = query_and_keys("random", 11, 130, channels, torch.float32)
    with torch_threads(1):  # torch's product is at its most accurate then
        plain = query @ keys.T
    result = all_similarities(query, keys)
    assert_as_accurate(result, query.double() @ keys.double().T, plain)


def test_reference_states_the_same():
    query, keys = query_and_keys("ties", 6, 90, 5, torch.float32)
    exclude = torch.tensor([0, 5, 89, 44, 1, 2])
    for arguments in ({}, {"exclude": exclude}):
        expected = reference.ring_sample(query, keys, 30, 70, **arguments)
        result = ring_sample(query, keys, 30, 70, return_indices=True, **arguments)
        assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])


def test_inputs_are_not_written():
    query, keys = query_and_keys("random", 4, 5000, 6, torch.float32)
    before = query.clone(), keys.clone()
    ring_sample(query, keys, 50, 60)
    assert torch.equal(query, before[0]) and torch.equal(keys, before[1])
