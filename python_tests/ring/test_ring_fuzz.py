"""Any query, keys, ring and options against the definition: the exact set, and losses and gradients within the error
that the arithmetic allows."""

import math
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuzz import DTYPES, KINDS, TAME, laid_out, percentiles, tensors, values
from iecl_fast import ring_info_nce, ring_sample
from iecl_fast.ring import reference
from torch_threads import torch_threads

U = 2.0**-24  # half the distance of float32 numbers at 1


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with torch_threads(1):
        yield


def ranks_of(lower, upper, num_keys):
    return [math.ceil(Fraction(Decimal(repr(share))) * num_keys / 100) for share in (lower, upper)]


@st.composite
def matrices(draw, kinds=KINDS, special=True):
    """query, keys, and how the keys are handed over: a tensor and its layout."""
    n, c = draw(st.integers(0, 9)), draw(st.integers(0, 40))
    # More than 4096 keys are sampled, and tiles end at multiples of 576.
    k = draw(st.integers(1, 80) | st.sampled_from([575, 576, 577, 1153]) | st.integers(4097, 5200))
    dtype = draw(st.sampled_from(DTYPES))
    query = draw(tensors((n, c), dtype, kinds, special))
    keys = draw(tensors((k, c), dtype, kinds, special))
    layout = draw(st.sampled_from(["KC", "CK", None]))
    if layout is None and (k == c or keys.shape[1] != c):
        layout = "KC"
    return query, keys, keys.T if layout == "CK" else keys, layout


@st.composite
def excludes(draw, n, k):
    """None, a key for each query, none for some."""
    least = draw(st.sampled_from([None, 0, -1]))
    if least is None:
        return None
    index = torch.tensor(draw(st.lists(st.integers(least, k - 1), min_size=n, max_size=n)), dtype=torch.int64)
    return draw(laid_out(index))


def kernel_similarities(query, keys):
    """The numbers that are ranked, from contiguous float32 copies, where no stride can go wrong."""
    copies = [tensor.float().clone(memory_format=torch.contiguous_format) for tensor in (query, keys)]
    return ring_sample(*copies, 0, 100, layout="KC")


def magnitudes(query, keys):
    """(N, K): the sum of the magnitudes of a dot product's terms, infinite if one is not finite."""
    product = query.double().abs() @ keys.double().abs().T
    return product.nan_to_num(nan=torch.inf)


def expected_members(similarities, ring, exclude):
    """For each row its members' indices; None where the ring is empty."""
    rows = []
    for row, own in enumerate([-1] * len(similarities) if exclude is None else exclude.tolist()):
        order = similarities[row].argsort(stable=True)
        order = order[order != own] if own >= 0 else order
        first, end = ranks_of(*ring, len(order))
        rows.append(order[first:end].sort().values if first < end else None)
    return rows


def is_refused(ring, num_keys, exclude, rows, num_samples):
    if not len(rows):
        first, end = ranks_of(*ring, num_keys - (exclude is not None))
        return first == end
    if any(members is None for members in rows):
        return True
    return num_samples is None and len({len(members) for members in rows}) > 1


@given(st.data())
def test_similarities_are_the_dot_products(data):
    query, keys, handed_over, layout = data.draw(matrices())
    similarities = ring_sample(query.float(), handed_over.float(), 0, 100, layout=layout)
    assert torch.equal(similarities.nan_to_num(7), kernel_similarities(query, keys).nan_to_num(7))
    exact = query.double() @ keys.double().T
    terms = magnitudes(query, keys)
    error = (similarities.double() - exact).abs()
    tame = terms < 1e38
    assert (error[tame] <= (query.shape[1] + 1) * (U * terms[tame] + 2.0**-149)).all()
    # What is NaN or infinite in an input is so in whatever order the terms are added.
    wild = ~(query.isfinite().all(1)[:, None] & keys.isfinite().all(1)) & (
        magnitudes(query.nan_to_num(0, 0, 0), keys.nan_to_num(0, 0, 0)) < 1e38
    )
    assert torch.equal(similarities[wild].isnan(), exact[wild].isnan())
    infinite = wild & exact.isinf()
    assert torch.equal(similarities[infinite].double(), exact[infinite])


@given(st.data())
def test_members_and_draws(data):
    query, keys, handed_over, layout = data.draw(matrices())
    ring = data.draw(percentiles())
    (n, _), k = query.shape, len(keys)
    exclude = data.draw(excludes(n, k))
    num_samples = data.draw(st.none() | st.integers(1, 30))
    seed = data.draw(st.integers(0, 99))
    similarities = kernel_similarities(query, keys)
    rows = expected_members(similarities, ring, exclude)
    before = [tensor.clone() for tensor in (query, keys)]

    def run(return_indices):
        return ring_sample(
            query,
            handed_over,
            *ring,
            num_samples=num_samples,
            exclude=exclude,
            generator=torch.Generator().manual_seed(seed),
            return_indices=return_indices,
            layout=layout,
        )

    if is_refused(ring, k, exclude, rows, num_samples):
        with pytest.raises(ValueError, match=r"keep no key|exclude mixes"):
            run(False)
        return
    found, indices = run(True)
    if num_samples is not None:
        uniform = torch.rand(n, num_samples, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        rows = [members[(row * len(members)).long()] for members, row in zip(rows, uniform)]
    wanted = torch.stack(rows) if rows else indices.new_empty(0, indices.shape[1])
    assert torch.equal(indices, wanted)
    assert found.dtype == query.dtype
    assert torch.equal(found.nan_to_num(7), similarities.gather(1, wanted).to(query.dtype).nan_to_num(7))
    assert torch.equal(run(False).nan_to_num(7), found.nan_to_num(7))
    assert all(torch.equal(one.nan_to_num(7), two.nan_to_num(7)) for one, two in zip((query, keys), before))


@given(st.data())
def test_gradients_of_members_and_draws(data):
    query, keys, _, _ = data.draw(matrices(TAME, special=False))
    ring = data.draw(percentiles())
    num_samples = data.draw(st.none() | st.integers(1, 30))
    first, end = ranks_of(*ring, len(keys))
    if first == end:
        return
    leaves = [query.detach().requires_grad_(), keys.detach().requires_grad_()]
    found, indices = ring_sample(*leaves, *ring, num_samples=num_samples, return_indices=True, layout="KC")
    slope = data.draw(tensors(tuple(found.shape), found.dtype, TAME, special=False))
    of_query, of_keys = torch.autograd.grad(found, leaves, slope)

    weights = slope.double()
    spread = weights.new_zeros(len(query), len(keys)).scatter_add_(1, indices, weights)
    sizes = weights.new_zeros(len(query), len(keys)).scatter_add_(1, indices, weights.abs())
    terms = found.shape[1] * max(len(query), 1)
    for got, exact, size in (
        (of_query, spread @ keys.double(), sizes @ keys.double().abs()),
        (of_keys, spread.T @ query.double(), sizes.T @ query.double().abs()),
    ):
        assert_within(got, exact, (terms + 2) * U * size)


def assert_within(got, exact, error):
    """Beyond ``error``, rounding to got's own dtype, and of a few float32 terms below the normal ones."""
    limits = torch.finfo(got.dtype)
    allowed = error + exact.abs() * limits.eps + limits.smallest_normal * limits.eps + 32 * 2.0**-149
    counts = exact.abs() + allowed < limits.max
    wrong = counts & ~((got.double() - exact).abs() <= allowed)
    assert not wrong.any(), f"{got[wrong].tolist()[:3]} for {exact[wrong].tolist()[:3]}, allowed {allowed[wrong][:3]}"


@st.composite
def temperatures(draw):
    number = 10.0 ** draw(st.floats(-3, 1))
    dtype = draw(st.sampled_from([None, torch.float64, *DTYPES]))
    if dtype is None:
        return number, number
    tensor = torch.full(draw(st.sampled_from([(), (1,), (1, 1)])), number, dtype=dtype, requires_grad=True)
    return tensor, tensor.item()


class Exact:
    """The loss of each row in float64, its gradients, and how far float32 arithmetic may be from them."""

    def __init__(self, query, positive_key, keys, mask, temperature):
        self.query, self.positive_key, self.keys, self.t = query, positive_key, keys, temperature
        similarities = (query @ keys.T).masked_fill(~mask, -torch.inf)
        positive = (query * positive_key).sum(1, keepdim=True)
        logits = torch.cat([positive, similarities], dim=1) / temperature
        self.loss = logits.logsumexp(1) - logits[:, 0]
        terms = torch.cat([(query * positive_key).abs().sum(1, keepdim=True), magnitudes(query, keys)], dim=1)
        member = torch.cat([torch.ones_like(mask[:, :1]), mask], dim=1)
        largest = terms.masked_fill(~(member & logits.isfinite()), 0).amax(1) / temperature
        self.tame = positive[:, 0].isfinite() & (largest < 1e30)
        self.all_finite = (logits.isfinite() | ~member).all(1)
        # Logarithms of sums differ by no more than their terms' exponents do.
        self.count = mask.sum(1).double()
        self.error = U * (2 * (query.shape[1] + 2) * largest + 8 * (largest + math.log(len(keys) + 1) + 1) + self.count)
        self.softmax = torch.where(member, (logits - logits.logsumexp(1, keepdim=True)).exp(), 0)[:, 1:]

    def query_gradient(self):
        """Of each row's loss: value, error."""
        keys, own = self.keys.nan_to_num(0, 0, 0), self.positive_key
        away = self.softmax.sum(1, keepdim=True)
        exact = (self.softmax @ keys - away * own) / self.t
        size = (self.softmax @ keys.abs() + away * own.abs()) / self.t
        lost = self.count[:, None] * 2.0**-125 * (keys.abs().sum() + own.abs()) / self.t  # below float32's range
        return exact, (3 * self.error + (self.count + 8) * U)[:, None] * size + lost

    def positive_gradient(self):
        exact = torch.expm1(-self.loss)[:, None] / self.t * self.query
        return exact, (self.error + 8 * U)[:, None] * self.query.abs() / self.t

    def keys_gradient(self, slope):
        weights, sizes = slope[:, None] * self.query / self.t, slope.abs()[:, None] * self.query.abs() / self.t
        factor = 3 * self.error + (len(self.query) + 8) * U
        lost = 2.0**-125 * sizes.sum(0)
        return self.softmax.T @ weights, (self.softmax * factor[:, None]).T @ sizes + lost


@given(st.data())
def test_loss_and_gradients(data):
    special = data.draw(st.booleans())
    query, keys, handed_over, layout = data.draw(matrices(KINDS if special else TAME, special))
    ring = data.draw(percentiles())
    (n, _), k = query.shape, len(keys)
    exclude = data.draw(excludes(n, k))
    positive_key = data.draw(tensors(tuple(query.shape), query.dtype, TAME, special=False))
    temperature, number = data.draw(temperatures())
    reduction = data.draw(st.sampled_from(["mean", "sum", "none"]))
    similarities = kernel_similarities(query, keys)

    leaves = [tensor.detach().requires_grad_() for tensor in (query, positive_key, handed_over)]
    options = {"lower": ring[0], "upper": ring[1], "exclude": exclude, "layout": layout}

    def run():
        return ring_info_nce(*leaves, temperature=temperature, reduction=reduction, **options)

    if is_refused(ring, k, exclude, expected_members(similarities, ring, exclude), num_samples=1):
        with pytest.raises(ValueError, match="keep no key"):
            run()
        return
    loss = run()
    mask = reference.member_mask(similarities, *ring, exclude)
    exact = Exact(query.double(), positive_key.double(), keys.double(), mask, number)
    each = ring_info_nce(*leaves, temperature=temperature, reduction="none", **options)
    rows = exact.tame
    assert loss.dtype == each.dtype == torch.float32 and each.shape == (n,)
    assert torch.equal(each[rows].isnan(), exact.loss[rows].isnan())
    assert torch.equal(each[rows].isinf(), exact.loss[rows].isinf())
    finite = rows & exact.loss.isfinite()
    assert_within(each[finite], exact.loss[finite], exact.error[finite])
    reduced = each if reduction == "none" else getattr(each, reduction)()
    assert torch.equal(loss.nan_to_num(7), reduced.nan_to_num(7))

    slope = data.draw(values(tuple(loss.shape), torch.float32, TAME, special=False))
    asked = [*leaves, temperature] if isinstance(temperature, torch.Tensor) else leaves
    of_query, of_positive, of_keys, *of_temperature = torch.autograd.grad(loss, asked, slope)
    row_slope = slope.double().expand(n) / (max(n, 1) if reduction == "mean" else 1)
    # Sums of keys beyond float32's range are not claimed.
    within = keys.double().nan_to_num(0, 0, 0).abs().amax(1).sum() < 1e37 if keys.numel() else True
    rows = exact.tame & exact.all_finite & (exact.error < 0.1) & within
    gradient, error = exact.query_gradient()
    for got, (value, allowed) in ((of_query, (gradient, error)), (of_positive, exact.positive_gradient())):
        scale = row_slope[:, None]
        assert_within(got[rows], (scale * value)[rows], (scale.abs() * (allowed + 2 * U * value.abs()))[rows])
    if not rows.all() or not keys.isfinite().all():
        return
    value, allowed = exact.keys_gradient(row_slope)
    assert_within(of_keys if layout != "CK" else of_keys.T, value, allowed)
    for got in of_temperature:
        size = (row_slope.abs()[:, None] * query.double().abs() * (error + 4 * U * gradient.abs())).sum() / number
        value = -(row_slope[:, None] * query.double() * gradient).sum() / number
        assert_within(got.reshape(()), value, size)
