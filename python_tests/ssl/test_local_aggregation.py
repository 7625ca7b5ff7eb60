import copy
import math

import pytest
import torch
from small import Pixels, assert_resumes_exactly, images, train_step
from torch.nn.functional import normalize

from iecl_fast.ring import RingSchedule
from iecl_fast.ssl import InstanceDiscrimination, LocalAggregation, build_method


def build(num_images=20, **options):
    defaults = {"num_samples": 50, "num_neighbors": 7, "num_clusters": 4, "num_clusterings": 3}
    schedule = {"steps_per_epoch": 2, "warm_start": 1.0, "recluster": 1.0}
    return LocalAggregation(Pixels(), num_images=num_images, dim=8, **{**defaults, **schedule, **options})


def dense_loss(queries, bank, labels, index, num_neighbors, temperature):
    """P(B and C) / P(B) by sets, one query at a time."""
    losses = []
    for query, own in zip(queries, index.tolist(), strict=True):
        similarity = bank @ query
        nearest = similarity.argsort(descending=True).tolist()
        background = {own, *[i for i in nearest if i != own][:num_neighbors]}
        close = {i for i in range(len(bank)) if any(run[i] == run[own] for run in labels)}
        assert own in close
        weights = (similarity / temperature).exp()
        losses.append(-(weights[sorted(background & close)].sum() / weights[sorted(background)].sum()).log())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("num_neighbors", [1, 7, 18, 19, 4096])
def test_loss_and_gradient_are_those_of_the_sets(num_neighbors):
    method = build(num_neighbors=num_neighbors, temperature=0.1)
    for _ in range(2):
        train_step(method, [images()], torch.arange(6))
    assert method.labels.min() == 0
    reference = copy.deepcopy(method.encoder)
    view, index = images(), torch.tensor([3, 0, 19, 7, 3, 11])
    method.encoder.zero_grad()
    reference.zero_grad()
    value = method([view], index)["contrast"]
    value.backward()
    queries = normalize(reference.head(reference.backbone(view)), dim=1)
    expected = dense_loss(queries, method.contrast.bank.keys, method.labels, index, num_neighbors, 0.1)
    expected.backward()
    torch.testing.assert_close(value, expected)
    for ours, theirs in zip(method.encoder.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("others", [10, 999, 4097, 49_999, 1_281_166])
def test_exactly_as_many_neighbours_as_asked_for(others):
    from iecl_fast.ring import ring_ranks

    for wanted in (1, 2, 7, min(4096, others - 1), others):
        lower = max(0.0, 100 * (others - wanted - 0.5) / others)
        first, end = ring_ranks(lower, 100, others)
        assert end - first == wanted


def test_starts_as_instance_discrimination():
    method = build(warm_start=1.5)
    other = InstanceDiscrimination(Pixels(), num_images=20, dim=8, num_samples=50)
    other.load_state_dict({name: value for name, value in method.state_dict().items() if name != "labels"})
    for step in range(3):
        assert (method.labels == -1).all() and method.diagnostics()["close_share"] == 0
        view, index = images(), torch.arange(6)
        torch.manual_seed(step)
        value = train_step(method, [view], index)
        torch.manual_seed(step)
        assert value == train_step(other, [view], index)
    assert (method.labels >= 0).all()
    train_step(method, [images()], torch.arange(6))
    assert 0 < method.diagnostics()["close_share"] < 1


def test_clusters_are_those_of_the_bank_and_computed_anew():
    method = build(recluster=2.0)
    groups = normalize(torch.eye(8)[torch.arange(20) % 4] + 0.01 * torch.randn(20, 8), dim=1)
    labels = []
    for _ in range(8):
        method.contrast.bank.keys.copy_(groups)
        method.after_step()
        labels.append(method.labels.clone())
    changed = [not torch.equal(before, after) for before, after in zip([labels[0], *labels[:-1]], labels, strict=True)]
    assert changed[1] and not any(changed[step] for step in (0, 2, 3, 4, 6, 7))  # after step 2, and every 4 from there
    together = labels[-1][:, :, None] == labels[-1][:, None]
    alike = torch.arange(20)[:, None] % 4 == torch.arange(20) % 4
    assert together[:, alike].float().mean() > 0.6 and together[:, ~alike].float().mean() < 0.4
    assert together.any(dim=0)[alike].float().mean() > 0.9


def test_resumes_exactly_between_two_clusterings():
    assert_resumes_exactly(lambda: build(recluster=2.0), steps=8, halt_at=5)


def test_draws_a_cluster_together():
    """Images come in 8 groups; nothing tells the loss, but neighbours find one another."""
    torch.manual_seed(0)
    method = build(64, num_neighbors=32, num_clusters=8, temperature=0.2, warm_start=20.0, num_samples=128)
    prototypes = images(8)[torch.arange(64) % 8] + 0.7 * images(64)
    optimizer = torch.optim.SGD(method.encoder.parameters(), lr=0.05, momentum=0.9)

    def within():
        bank = method.contrast.bank.keys
        similarity = bank @ bank.T
        alike = (torch.arange(64)[:, None] % 8 == torch.arange(64) % 8) & ~torch.eye(64, dtype=torch.bool)
        return (similarity[alike].mean() - similarity[~alike].mean()).item()

    gaps = []
    for step in range(140):
        if step == 40:
            gaps.append(within())
        index = torch.randperm(64)[:32]
        train_step(method, [prototypes[index]], index, optimizer)
    assert within() > gaps[0] + 0.1


def test_build_method_and_its_errors():
    method = build_method("la", Pixels(), num_images=86, steps_per_epoch=3, dim=4, ring=None)
    assert (method.num_clusters, method.num_neighbors, method.warm_steps, method.recluster_steps) == (2, 85, 30, 3)
    assert build(num_clusters=None).num_clusters == 1
    assert build(warm_start=0.0, recluster=0.0).warm_steps == 1
    assert set(method.diagnostics()) == {"positive_similarity", "close_share"}
    with pytest.raises(TypeError, match="ring"):
        build_method("la", Pixels(), num_images=9, steps_per_epoch=3, ring=RingSchedule(steps=3))
    for options, words in [
        ({"num_neighbors": 0}, "num_neighbors must be at least 1, got 0"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be at least 1, got 0"),
        ({"num_clusterings": 0}, "num_clusterings must be at least 1, got 0"),
        ({"num_clusters": 21}, r"num_clusters must lie in 1\.\.20, .* got 21"),
        ({"warm_start": -1.0}, "warm_start must not be negative"),
        ({"recluster": math.nan}, "recluster must not be negative, got nan"),
    ]:
        with pytest.raises(ValueError, match=words):
            build(**options)
