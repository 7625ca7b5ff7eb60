"""Every method compiles as a whole, ring and block included, once for all steps, and does what it does uncompiled."""

import copy

import pytest
import torch
from small import Pixels
from torch._dynamo.testing import CompileCounterWithBackend

from iecl_fast.ring import AdaptiveRingSchedule, RingSchedule
from iecl_fast.ssl import METHODS, LabBackbone, accepts, build_method
from toys import Block, Normed, assert_same_state, train_step, two_views

WITH_BLOCK = {
    "moco": {"num_keys": 16},
    "iecl": {"num_keys": 16, "hidden_dim": 16, "symmetric": True},
    "simclr": {},
    "byol": {"hidden_dim": 16},
    "simsiam": {"hidden_dim": 16},
}
WITH_BANK = {
    "ir": {"num_samples": 8, "loss": "nce"},
    "cmc": {"num_samples": 8},
    "la": {"num_samples": 8, "num_neighbors": 5, "num_clusterings": 2, "steps_per_epoch": 2, "warm_start": 1.0},
}
STEPS = 6


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", WITH_BLOCK)
def test_compiled_gives_the_eager_results(name):
    eager = build_method(name, Normed(), dim=8, spectral=True, saib=Block(), **WITH_BLOCK[name])
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        views = two_views()
        expected = train_step(eager, views)
        losses = compiled(views)
        sum(losses.values()).backward()
        other.after_step()
        for term, loss in losses.items():
            torch.testing.assert_close(loss, expected[term])
    assert eager.backbone.norm.num_batches_tracked == 3 * (2 if name in ("byol", "simsiam") else 1 + (name == "iecl"))
    assert_same_state(eager, other)


def build(name, ring):
    """A method with all that it takes, on images of 4 x 4 pixels."""
    options = {"dim": 8, **WITH_BLOCK.get(name, {}), **WITH_BANK.get(name, {})}
    if accepts(name, "ring"):
        options["ring"] = ring
    if name == "cmc":
        backbone = LabBackbone(Pixels(1), Pixels(2), mean=(0.5,) * 3, std=(0.2,) * 3)
        return build_method(name, backbone, num_images=30, **options)
    if name in WITH_BANK:
        return build_method(name, Normed(), num_images=30, **options)
    return build_method(name, Normed(), spectral=True, saib=Block(), **options)


def train(method, forward, steps):
    """The losses of some steps, the same draws in every training."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        views = [torch.randn(6, 3, 4, 4, generator=generator) for _ in range(method.num_views)]
        parts = forward(views, torch.randint(30, (6,), generator=generator))
        sum(parts.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
        method.after_step()
        losses.append({term: loss.detach() for term, loss in parts.items()})
    return losses


def assert_alike(losses, expected, method, eager):
    torch.testing.assert_close(losses, expected)
    for key, tensor in eager.state_dict().items():
        torch.testing.assert_close(method.state_dict()[key], tensor, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", METHODS)
def test_an_annealed_ring_is_compiled_once(name):
    """The percentiles are other ones in every step; local aggregation has one graph more, without its warm start."""
    eager = build(name, RingSchedule(lower=(0, 40), upper=90, steps=STEPS))
    method = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    expected = train(eager, eager, STEPS)
    losses = train(method, torch.compile(method, backend=counter, fullgraph=True), STEPS)
    assert_alike(losses, expected, method, eager)
    assert counter.frame_count == (2 if name == "la" else 1)
    if accepts(name, "ring"):
        assert method.percentiles() == (40, 90)


@pytest.mark.parametrize("interval", [1, 3])
def test_terms_between_are_one_graph_more(interval):
    eager = build_method("iecl", Normed(), dim=8, num_keys=16, hidden_dim=16, terms_interval=interval, saib=Block())
    method = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    expected = train(eager, eager, STEPS)
    assert_alike(train(method, torch.compile(method, backend=counter, fullgraph=True), STEPS), expected, method, eager)
    assert counter.frame_count == (1 if interval == 1 else 2)


def test_a_ring_that_waits_for_the_loss_is_compiled_once():
    method = build("moco", AdaptiveRingSchedule(lower=(0, 40), upper=90, steps=STEPS))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(method, backend=counter, fullgraph=True)
    seen = []
    for step in range(STEPS):
        compiled(two_views())["contrast"].backward()
        method.after_step()
        method.ring.observe(10.0 - step)
        method.look_up_step()
        seen.append(method.percentiles()[0])
        assert method.percentiles_of_forward()[0].item() == seen[-1]
    assert counter.frame_count == 1
    assert seen == sorted(set(seen)) and len(seen) == STEPS


def test_an_index_outside_the_bank_is_an_error_in_a_graph_too():
    method = build("ir", None)
    compiled = torch.compile(method, backend="aot_eager", fullgraph=True)
    views = [torch.randn(6, 3, 4, 4)]
    compiled(views, torch.arange(6))
    for wrong in (-1, 30):
        with pytest.raises(RuntimeError, match=r"index must lie in 0\.\.29"):
            compiled(views, torch.tensor([0, 1, 2, wrong, 4, 5]))


def test_what_the_step_decides_comes_back_with_the_state():
    method = build("moco", RingSchedule(lower=(0, 40), upper=90, steps=STEPS))
    train(method, method, 3)
    other = build("moco", RingSchedule(lower=(0, 40), upper=90, steps=STEPS))
    other.load_state_dict(method.state_dict())
    assert [float(p) for p in other.percentiles_of_forward()] == [20.0, 90.0] == list(other.percentiles())


def test_generated_code_fills_the_queue_alike():
    """By inductor, which writes C++ for all but our operators."""
    eager = build("moco", RingSchedule(lower=(0, 40), upper=90, steps=STEPS))
    method = copy.deepcopy(eager)
    expected = train(eager, eager, STEPS)
    losses = train(method, torch.compile(method, fullgraph=True), STEPS)
    assert_alike(losses, expected, method, eager)
    assert method.queue.filled == 16
    torch.testing.assert_close(method.queue.keys, eager.queue.keys)
