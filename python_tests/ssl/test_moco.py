import copy
import math
import pickle

import pytest
import torch
from torch import nn

from iecl_fast.ring import RingSchedule, ring_info_nce
from iecl_fast.ssl import METHODS, MoCo, build_backbone, build_method
from toys import Block, Flat, Normed, train_step, two_views


def plain_moco_loss(queries, keys, queue, temperature):
    """The original's code: positive logits first, then the queue's, cross entropy with target 0."""
    logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], dim=1) / temperature
    return nn.functional.cross_entropy(logits, torch.zeros(len(queries), dtype=torch.int64))


def embed(network, images):
    return nn.functional.normalize(network(images), dim=1)


@pytest.mark.parametrize(("head", "temperature"), [("linear", 0.07), ("mlp", 0.2)])
def test_loss_and_gradient_are_the_originals(head, temperature):
    method = MoCo(Flat(), dim=8, num_keys=32, head=head, temperature=temperature)
    views = two_views()
    loss = method(views)["contrast"]
    loss.backward()

    reference = nn.Sequential(copy.deepcopy(method.encoder.backbone), copy.deepcopy(method.encoder.head))
    reference.zero_grad()
    keys = embed(reference, views[1]).detach()
    expected = plain_moco_loss(embed(reference, views[0]), keys, method.queue.keys, temperature)
    expected.backward()

    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(method.encoder.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4)
    assert all(p.grad is None for p in method.key_encoder.parameters())


def test_order_of_events_follows_the_original():
    method = MoCo(Flat(), dim=8, num_keys=16, momentum=0.9, temperature=0.2)
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=0.5)
    online, key = copy.deepcopy(method.encoder), copy.deepcopy(method.encoder)
    queue = method.queue.keys.clone()
    reference_optimizer = torch.optim.SGD(online.parameters(), lr=0.5)

    for step in range(4):
        views = two_views()
        loss = train_step(method, views, optimizer)["contrast"]
        with torch.no_grad():  # the original moves the key encoder first, then encodes
            for mine, theirs in zip(key.parameters(), online.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
            keys = key(views[1])
        expected = plain_moco_loss(online(views[0]), keys, queue, 0.2)
        expected.backward()
        reference_optimizer.step()
        reference_optimizer.zero_grad()
        rows = torch.arange(6 * step, 6 * step + 6) % 16
        queue[rows] = keys
        torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(method.queue.keys, queue, atol=1e-4, rtol=1e-4)
    assert method.step == 4 and method.queue.filled == 16


def test_symmetric_loss_is_the_mean_and_enqueues_once_after_both_halves():
    method = MoCo(Flat(), dim=8, num_keys=20, symmetric=True)
    queue = method.queue.keys.clone()
    views = two_views()
    loss = method(views)["contrast"]
    assert torch.equal(method.queue.keys, queue)  # nothing met itself as a negative

    first, second = (method.encoder(view).detach() for view in views)
    halves = [plain_moco_loss(a, b, queue, method.temperature) for a, b in ((first, second), (second, first))]
    torch.testing.assert_close(loss.detach(), sum(halves) / 2)
    loss.backward()
    method.after_step()
    assert method.queue.filled == 12
    torch.testing.assert_close(method.queue.keys[:12], torch.cat([second, first]))
    method.after_step()
    assert method.queue.filled == 12  # no key twice


def test_accumulated_batches_are_all_enqueued_in_order():
    method = MoCo(Flat(), dim=8, num_keys=20)
    batches = [two_views(3), two_views(5)]
    for views in batches:
        method(views)["contrast"].backward()
    expected = torch.cat([method.key_encoder(views[1]) for views in batches])
    method.after_step()
    assert method.queue.filled == 8 and method.step == 1
    torch.testing.assert_close(method.queue.keys[:8], expected)


def test_evaluation_mode_leaves_no_trace():
    method = MoCo(build_backbone("resnet18", "small", 4), dim=8, num_keys=20).eval()
    before = copy.deepcopy(method.state_dict())
    method(two_views(size=16))
    method.queue.enqueue(torch.zeros(0, 8))
    method.after_step()
    after = method.state_dict()
    assert method.queue.filled == 0
    assert all(torch.equal(before[name], after[name]) for name in before if name != "step")


def test_ring_percentiles_follow_the_step_and_reach_the_loss():
    schedule = RingSchedule(lower=(0, 80), upper=90, steps=2)
    method = MoCo(Flat(), dim=8, num_keys=50, ring=schedule)
    for _ in range(4):
        views = two_views()
        lower, upper = schedule(int(method.step))
        assert method.percentiles() == (lower, upper)
        with torch.no_grad():
            queries, keys = method.encoder(views[0]), method.key_encoder(views[1])
        expected = ring_info_nce(queries, keys, method.queue.keys, lower=lower, upper=upper, temperature=0.07)
        torch.testing.assert_close(train_step(method, views)["contrast"].detach(), expected)
    assert method.percentiles() == (80, 90)


def test_diagnostics_are_plain_numbers():
    method = MoCo(Flat(), dim=8, num_keys=50, ring=RingSchedule(lower=(0, 80), upper=90, steps=4))
    image = torch.randn(6, 3, 4, 4)
    train_step(method, [image, image])
    diagnostics = method.diagnostics()
    assert diagnostics["positive_similarity"] == pytest.approx(1.0, abs=1e-5)  # both branches still agree
    assert (diagnostics["ring_lower"], diagnostics["ring_upper"], diagnostics["queue_filled"]) == (20, 90, 6)
    assert all(type(value) is float for value in diagnostics.values())
    assert MoCo(Flat(), num_keys=8).diagnostics()["ring_upper"] == 100


def test_resume_from_the_state_dict_is_exact():
    def build():
        return MoCo(Flat(), dim=8, num_keys=16, momentum=0.5, ring=RingSchedule(lower=(0, 60), upper=90, steps=6))

    batches = [two_views() for _ in range(6)]
    whole = build()
    halted = build()
    halted.load_state_dict(whole.state_dict())
    optimizer = torch.optim.SGD(whole.encoder.parameters(), lr=0.1)
    expected = [train_step(whole, views, optimizer)["contrast"].item() for views in batches]

    optimizer = torch.optim.SGD(halted.encoder.parameters(), lr=0.1)
    losses = [train_step(halted, views, optimizer)["contrast"].item() for views in batches[:3]]
    resumed = build()
    resumed.load_state_dict(halted.state_dict())
    optimizer = torch.optim.SGD(resumed.encoder.parameters(), lr=0.1)
    losses += [train_step(resumed, views, optimizer)["contrast"].item() for views in batches[3:]]
    assert losses == expected
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_batch_norm_is_each_branchs_own():
    method = MoCo(build_backbone("resnet18", "small", 4), dim=8, num_keys=16)
    train_step(method, [torch.randn(4, 3, 16, 16) + 3, torch.randn(4, 3, 16, 16) - 3])
    query, key = method.backbone.bn1, method.key_encoder.module.backbone.bn1
    assert query.num_batches_tracked == key.num_batches_tracked == 1
    assert not torch.equal(query.running_mean, key.running_mean)


@pytest.mark.parametrize("ring", [None, RingSchedule(lower=(0, 50), upper=90, steps=100)])
def test_learns_what_the_views_share(ring):
    torch.manual_seed(0)
    method = MoCo(Flat(), dim=16, num_keys=128, temperature=0.2, momentum=0.9, ring=ring)
    optimizer = torch.optim.SGD(method.encoder.parameters(), lr=0.03, momentum=0.9)
    losses = []
    for _ in range(200):
        views = [2 * torch.randn(32, 3, 4, 4) for _ in range(2)]
        views[1][:, 0] = views[0][:, 0] / 2  # one channel agrees up to its scale, the others are noise
        losses.append(train_step(method, views, optimizer)["contrast"].item())
    lower, upper = method.percentiles()
    chance = math.log(math.ceil(upper * 1.28) - math.ceil(lower * 1.28) + 1)
    assert sum(losses[5:15]) / 10 > 0.8 * chance  # the first steps meet the queue's random rows, which are easy
    assert sum(losses[-10:]) / 10 < 0.5 * chance


@pytest.mark.parametrize("temperature", [0.005, 0.01, 0.07, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_with_a_zero_row_at_any_temperature_and_precision(temperature, dtype):
    method = MoCo(Flat(), dim=8, num_keys=16, temperature=temperature, head="linear")
    with torch.no_grad():  # a black image then has the zero embedding
        for module in (method.encoder, method.key_encoder.module):
            module.backbone.linear.bias.zero_()
            module.head[0].bias.zero_()
    views = two_views()
    views[0][2] = 0
    views[1][3] = 0
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        loss = method(views)["contrast"]
    loss.backward()
    method.after_step()
    assert loss.dtype == torch.float32 and loss.isfinite()
    assert all(p.grad.isfinite().all() for p in method.encoder.parameters())
    assert method.queue.keys.dtype == torch.float32 and (method.queue.keys[3] == 0).all()


@pytest.mark.parametrize("ring", [None, RingSchedule(lower=(0, 80), upper=90, steps=5)])
def test_compiled_gives_the_eager_results_while_the_schedule_moves(ring):
    eager = MoCo(Flat(), dim=8, num_keys=16, ring=ring)
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=ring is None)
    for _ in range(4):
        views = two_views()
        expected = train_step(eager, views)["contrast"]
        loss = compiled(views)["contrast"]
        loss.backward()
        other.after_step()
        torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(other.queue.keys, eager.queue.keys)
    assert other.step == 4


def test_copies_and_pickles():
    method = MoCo(Flat(), dim=8, num_keys=16)
    train_step(method, two_views())
    views = two_views()
    expected = method(views)["contrast"]
    for other in (copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
        assert torch.equal(other(views)["contrast"], expected)


def test_build_method():
    method = build_method("moco", Flat(), dim=8, num_keys=16, temperature=0.2)
    assert type(method) is METHODS["moco"] is MoCo
    assert method.temperature == 0.2 and method.ring is None and method.queue.keys.shape == (16, 8)
    assert method.num_views == 2
    with pytest.raises(ValueError, match=r"name must be one of moco, .*, got 'mocco'"):
        build_method("mocco", Flat())
    with pytest.raises(TypeError, match="temprature"):
        build_method("moco", Flat(), temprature=0.1)


def test_errors_of_moco():
    with pytest.raises(ValueError, match=r"temperature = 0\.0 is not allowed: a positive number"):
        MoCo(Flat(), temperature=0.0)
    with pytest.raises(ValueError, match="views must be a list of 2 tensors, got 3"):
        MoCo(Flat(), num_keys=8)([torch.zeros(2, 3, 4, 4)] * 3)


def test_with_a_block_the_keys_are_of_the_transformed_view_and_the_block_learns_from_the_entropy():
    method = MoCo(Normed(), dim=8, num_keys=16, spectral=True, saib=Block())
    views = two_views()
    keys = copy.deepcopy(method.key_encoder)(method.saib(views[1]))
    losses = method(views)
    assert list(losses) == ["contrast", "entropy"]
    losses["contrast"].backward(retain_graph=True)
    assert method.saib.conv.weight.grad is None
    losses["entropy"].backward()
    assert method.saib.conv.weight.grad.abs().sum() > 0
    method.after_step()
    torch.testing.assert_close(method.queue.keys[:6], keys)
    assert {"sigma", "entropy_query"} <= method.diagnostics().keys()
    assert list(MoCo(Flat(), num_keys=8, saib=Block(), entropy_weight=0.0)(two_views())) == ["contrast"]
