"""What InfoNCE over a ring has to hold to, at any size: on the CPU and in Triton's interpreter."""

import math

import torch

from iecl_fast import ring_info_nce
from iecl_fast.ring import reference
from ring.cases import query_and_keys


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
