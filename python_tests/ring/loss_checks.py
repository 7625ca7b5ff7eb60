"""What InfoNCE over a ring has to hold to, at any size: on the CPU and in Triton's interpreter."""

import math

import torch
import torch.nn.functional as F

from accuracy import assert_as_accurate, joined
from iecl_fast import ring_info_nce, ring_sample
from iecl_fast.ring import reference
from ring.cases import query_and_keys


def plain_loss(query, positive_key, keys, temperature, mask):
    """MoCo's loss as everyone writes it, all in the dtype of its inputs."""
    positive = torch.einsum("nc,nc->n", query, positive_key)[:, None]
    logits = torch.cat([positive, torch.einsum("nc,kc->nk", query, keys)], dim=1) / temperature.to(query.dtype)
    logits = logits.masked_fill(~F.pad(mask, (1, 0), value=True), -torch.inf)
    return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long), reduction="none")


def losses_and_gradients(loss, inputs, weights):
    """Losses (N,) and the gradients of their weighted sum with respect to all inputs."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    values = loss(*leaves)
    return values.detach(), *torch.autograd.grad((values * weights.to(values.dtype)).sum(), leaves)


def check_accuracy(ring, size, dtype, draws=1):
    """The loss and its four gradients, by the rule of accuracy.py, over `draws` problems."""
    runs = zip(*(_ours_exact_and_plain(ring, size, dtype) for _ in range(draws)))
    for name, *values in zip(("loss", "query", "positive_key", "keys", "temperature"), *map(joined, runs), strict=True):
        assert values[0].dtype == (torch.float32 if name in ("loss", "temperature") else dtype)
        assert values[1].abs().max() > 1e-3, f"{name} does not depend on the ring"
        assert_as_accurate(*values)


def _ours_exact_and_plain(ring, size, dtype):
    query, keys = query_and_keys("unit", *size, dtype)
    positive_key = F.normalize(query.float() + torch.randn_like(query.float()) / 4, dim=1).to(dtype)
    temperature = torch.tensor(0.2)
    # Each row weighs differently and each term matters: the gradients of all four inputs differ from zero.
    weights = torch.rand(size[0]) + 0.5
    mask = reference.member_mask(reference.similarity(query, keys), *ring)

    inputs = (query, positive_key, keys, temperature)
    result = losses_and_gradients(
        lambda q, p, k, t: ring_info_nce(q, p, k, lower=ring[0], upper=ring[1], temperature=t, reduction="none"),
        inputs,
        weights,
    )
    expected = losses_and_gradients(
        lambda q, p, k, t: plain_loss(q, p, k, t, mask), [tensor.double() for tensor in inputs], weights
    )
    plain = losses_and_gradients(lambda q, p, k, t: plain_loss(q, p, k, t, mask), inputs, weights)
    return result, expected, plain


def check_finite(ring, temperature, dtype, spread, *, n, k):
    """Also with keys that are no unit rows: similarities of +-100 make exp(1e5) of a temperature of 1e-3."""
    query, keys = query_and_keys("unit", n, k, 8, dtype)
    keys[::7] *= spread
    leaves = [query.requires_grad_(), query.detach().flip(0).requires_grad_(), keys.requires_grad_()]
    loss = ring_info_nce(*leaves, lower=ring[0], upper=ring[1], temperature=temperature, reduction="none")
    expected = reference.ring_info_nce(*(leaf.detach().double() for leaf in leaves), temperature, *ring)
    torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-5, atol=1e-3 * temperature)
    for gradient in torch.autograd.grad(loss.sum(), leaves):
        assert gradient.isfinite().all()


def check_tied_keys(kind, ring, *, n, k):
    """Which of many equal keys are members matters: they are different vectors."""
    query, keys = query_and_keys(kind, n, k, 5, torch.float32)
    query.requires_grad_()
    loss = ring_info_nce(query, torch.zeros_like(query), keys, lower=ring[0], upper=ring[1], temperature=2.0)
    double = query.detach().double().requires_grad_()
    expected = reference.ring_info_nce(double, torch.zeros_like(double), keys.double(), 2.0, *ring).mean()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    gradients = torch.autograd.grad(loss, query)[0], torch.autograd.grad(expected, double)[0]
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=1e-5, atol=1e-7)


def check_infinite_query(*, n, k):
    """It leaves the other rows alone."""
    query, keys = query_and_keys("unit", n, k, 24, torch.float32)
    positive = query.roll(1, 0).clone()
    query[5] = math.inf
    query.requires_grad_(True)
    losses = ring_info_nce(query, positive, keys, reduction="none")
    others = torch.arange(n) != 5
    losses[others].sum().backward()
    alone = query.detach()[others].requires_grad_(True)
    expected = ring_info_nce(alone, positive[others], keys, reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(losses[others], expected)
    torch.testing.assert_close(query.grad[others], alone.grad)


def check_autocast():
    """It leaves the inputs their dtype."""
    query, keys = query_and_keys("unit", 4, 60, 6, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = ring_info_nce(query, query, keys), ring_sample(query, keys, 10, 90)
    assert torch.equal(inside[0], ring_info_nce(query, query, keys))
    assert torch.equal(inside[1], ring_sample(query, keys, 10, 90))
