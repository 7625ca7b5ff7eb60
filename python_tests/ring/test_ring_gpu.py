"""The promises of Ring on a CUDA device, where there is one: same sets as the CPU, same accuracy, capturable."""

import pytest
import torch
import torch.nn.functional as F

from accuracy import assert_as_accurate
from iecl_fast import ring_info_nce, ring_sample
from iecl_fast.ring import reference
from ring.cases import DTYPES, KINDS, layouts, query_and_keys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EXACT = [kind for kind in KINDS if kind not in ("random", "unit", "huge")]  # similarities without rounding
RINGS = ((0, 100), (90, 99), (20, 21), (55, 100))


def problem(n=64, k=70_000, c=128, dtype=torch.float32, kind="unit"):
    query, keys = query_and_keys(kind, n, k, c, dtype)
    positive_key = F.normalize(query.float() + torch.randn(n, c) / 4, dim=1).to(dtype)
    return query.cuda(), positive_key.cuda(), keys.cuda()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("size", [(9, 700, 24), (70, 20_011, 128)], ids=str)
def test_same_sets_as_the_cpu(size, kind, dtype):
    query, keys = query_and_keys(kind, *size, dtype)
    for lower, upper in RINGS:
        values, indices = ring_sample(query, keys, lower, upper, return_indices=True)
        got, places = ring_sample(query.cuda(), keys.cuda(), lower, upper, return_indices=True)
        assert torch.equal(places.cpu(), indices)
        assert torch.equal(got.cpu().nan_to_num(7), values.nan_to_num(7))


@pytest.mark.parametrize("k", [700, 20_011])
def test_excluded_keys_and_layouts(k):
    query, keys = query_and_keys("ties", 9, k, 24, torch.float16)
    exclude = torch.arange(9) * (k // 9) - 1
    expected = ring_sample(query[1:], keys, 30, 99, exclude=exclude[1:], return_indices=True)
    for name, (stored, options) in layouts(keys).items():
        options["exclude"] = exclude[1:].cuda()
        got = ring_sample(query[1:].cuda(), stored.cuda(), 30, 99, return_indices=True, **options)
        assert torch.equal(got[0].cpu(), expected[0]) and torch.equal(got[1].cpu(), expected[1]), name


def test_draws_are_the_members_at_their_positions():
    query, _, keys = problem(dtype=torch.bfloat16)
    members = ring_sample(query, keys, 90, 99, return_indices=True)[1]
    generator = torch.Generator("cuda").manual_seed(3)
    drawn = ring_sample(query, keys, 90, 99, num_samples=4096, generator=generator, return_indices=True)[1]
    uniform = torch.rand(len(query), 4096, generator=generator.manual_seed(3), device="cuda", dtype=torch.float64)
    assert torch.equal(drawn, members.gather(1, (uniform * members.shape[1]).long()))


def loss_and_gradients(loss, inputs, weights):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    values = loss(*leaves)
    return values, *torch.autograd.grad((values * weights.to(values.dtype)).sum(), leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(64, 4096, 128), (200, 70_000, 128), (64, 9000, 256), (3, 40_000, 100)], ids=str)
@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_as_accurate_as_plain_pytorch(ring, size, dtype):
    inputs = (*problem(*size, dtype), torch.tensor(0.2, device="cuda"))
    weights = torch.rand(size[0], device="cuda") + 0.5
    # The set is checked above; where rounding decides a boundary, the loss hardly changes: mask by our own set.
    indices = ring_sample(inputs[0], inputs[2], *ring, return_indices=True)[1]
    mask = torch.zeros(size[0], size[1], dtype=torch.bool, device="cuda").scatter_(1, indices, True)

    def plain(query, positive_key, keys, temperature):
        positive = (query * positive_key).sum(dim=1, keepdim=True)
        logits = torch.cat([positive, query @ keys.T], dim=1) / temperature.to(query.dtype)
        logits = logits.masked_fill(~F.pad(mask, (1, 0), value=True), -torch.inf)
        return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long, device="cuda"), reduction="none")

    def ours(query, positive_key, keys, temperature):
        options = {"lower": ring[0], "upper": ring[1], "temperature": temperature, "reduction": "none"}
        return ring_info_nce(query, positive_key, keys, **options)

    result = loss_and_gradients(ours, inputs, weights)
    expected = loss_and_gradients(plain, [tensor.double() for tensor in inputs], weights)
    for got, truth, same_dtype in zip(result, expected, loss_and_gradients(plain, inputs, weights)):
        assert_as_accurate(got, truth, same_dtype)


@pytest.mark.parametrize("kind", ["ties", "constant", "sorted", "infinite", "nan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adversarial_keys(dtype, kind):
    query, positive_key, keys = problem(kind=kind, dtype=dtype)
    loss = ring_info_nce(query, positive_key, keys, lower=60, upper=95, reduction="none")
    inputs = [tensor.double() for tensor in (query, positive_key, keys)]
    expected = torch.cat(
        [
            reference.ring_info_nce(q, p, inputs[2], 0.07, 60, 95)
            for q, p in zip(*(tensor.split(8) for tensor in inputs[:2]))
        ]
    )
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_in_every_run(dtype):
    inputs = problem(dtype=dtype)

    def run():
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        loss = ring_info_nce(*leaves, lower=90, upper=99)
        return torch.cat([loss[None], *(part.flatten() for part in torch.autograd.grad(loss, leaves))])

    first = run()
    assert first.isfinite().all()
    assert all(torch.equal(run(), first) for _ in range(19))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [4096, 70_000])
def test_captures_into_a_graph_and_never_waits(k, dtype):
    query, positive_key, keys = problem(k=k, dtype=dtype)
    query.requires_grad_()

    def run():
        loss = ring_info_nce(query, positive_key, keys, lower=90, upper=99)
        return loss, *torch.autograd.grad(loss, query), ring_sample(query.detach(), keys, 90, 99)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        with torch.no_grad():
            query.copy_(F.normalize(torch.randn_like(query.float()), dim=1))
            keys.copy_(F.normalize(torch.randn_like(keys.float()), dim=1))
        graph.replay()
        for got, expected in zip(captured, run()):
            assert torch.equal(got, expected)


def test_side_stream():
    inputs = problem(dtype=torch.bfloat16)
    expected = ring_info_nce(*inputs, lower=90, upper=99, reduction="none")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(100_000_000)  # the default stream is busy
    with torch.cuda.stream(side):
        got = ring_info_nce(*inputs, lower=90, upper=99, reduction="none")
    side.synchronize()
    assert torch.equal(got, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_second_device():
    inputs = problem()
    expected = ring_info_nce(*inputs, lower=90, upper=99)
    got = ring_info_nce(*(tensor.to("cuda:1") for tensor in inputs), lower=90, upper=99)
    assert got.device.index == 1 and torch.equal(got.cpu(), expected.cpu()) and torch.cuda.current_device() == 0


def test_memory_at_the_size_of_imagenet():
    """N x K in float32 would be 1.3 GB."""
    query, positive_key, keys = problem(256, 1_281_167, dtype=torch.bfloat16)
    query.requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ring_info_nce(query, positive_key, keys, lower=90, upper=99).backward()
    # Plan B' bounds its buffers, which hold the candidates of the two boundaries, to 256 MiB.
    assert torch.cuda.max_memory_allocated() - before < 300 * 2**20


@pytest.mark.parametrize("k", [70_000, 300_000])
def test_both_plans_agree(k, monkeypatch):
    """Written once or formed anew in each pass: the same members, whatever the matrix unit rounds like."""
    plans = pytest.importorskip("iecl_fast.ring.plans")
    query, positive_key, keys = problem(200, k, dtype=torch.bfloat16)
    losses, gradients = [], []
    for written_bytes in (0, 2**40):
        monkeypatch.setattr(plans, "WRITTEN_BYTES", written_bytes)
        leaf = query.clone().requires_grad_()
        loss = ring_info_nce(leaf, positive_key, keys, lower=90, upper=99, reduction="none")
        losses.append(loss.detach())
        gradients += torch.autograd.grad(loss.sum(), leaf)
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=0.02, atol=1e-3)
