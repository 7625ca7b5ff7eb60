"""IE-CL: algorithm 1's losses, who learns from which term, and what the terms are for."""

import copy
import math

import pytest
import torch

from iecl_fast.entropy import effective_rank, gaussian_entropy, gaussian_kl, knn_entropy, uniformity
from iecl_fast.ring import RingSchedule, ring_info_nce
from iecl_fast.spectral import SpectralNormHandle
from iecl_fast.ssl import IECL, MoCo
from toys import Block, Flat, Normed, assert_same_state, train_step, two_views

SMALL = {"dim": 8, "hidden_dim": 16, "num_keys": 32}


def build(backbone=Flat, *, saib=True, **options):
    """An IECL; a flat backbone has no convolution to normalise."""
    torch.manual_seed(0)
    options = {"spectral": backbone is not Flat, **SMALL, **options}
    return IECL(backbone(), saib=Block() if saib else None, **options)


def learners(method, *terms):
    """The parts of the method that some terms' gradient reaches."""
    losses = method(two_views())
    sum(losses[term] for term in terms).backward()
    parts = {"encoder": method.encoder, "saib": method.saib, "keys": method.key_encoder}
    return {
        name
        for name, part in parts.items()
        if any(p.grad is not None and p.grad.abs().sum() > 0 for p in part.parameters())
    }


@pytest.mark.parametrize("backbone", [Flat, Normed])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(
    ("term", "expected"), [("contrast", {"encoder"}), ("kl", {"encoder"}), ("entropy", {"encoder", "saib"})]
)
def test_who_learns_from_which_term(backbone, symmetric, term, expected):
    method = build(backbone, symmetric=symmetric)
    assert learners(method, term) == expected
    trained = [p for name in ("encoder", "saib") for p in getattr(method, name).parameters()]
    assert all(p.requires_grad for p in trained)


def test_the_divergence_reaches_the_encoder_by_the_anchors_only():
    """With the queries' gradient let through, the encoder's would be another."""
    method = build(kl_weight=1.0, entropy_weight=0.0, head="mlp")
    views = two_views()
    method(views)["kl"].backward()
    own = [p.grad.clone() for p in method.encoder.parameters()]
    method.zero_grad()
    with torch.no_grad():
        queries = method.encoder(method.saib(views[1]))
    scale = math.sqrt(8)
    kl = gaussian_kl(queries * scale, method.encoder(views[0]) * scale, variance="diagonal", noise_floor=0.01) / 8
    kl.backward()
    for ours, parameter in zip(own, method.encoder.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad)


ENTROPIES = {
    "gaussian": lambda rows: gaussian_entropy(rows * math.sqrt(8), noise_floor=0.01) / 8,
    "knn": lambda rows: knn_entropy(rows * math.sqrt(8)) / 8,
    "uniformity": lambda rows: -uniformity(rows),
}


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("entropy", ENTROPIES)
def test_losses_are_algorithm_1(entropy, symmetric):
    ring = RingSchedule(lower=(0, 50), upper=90, steps=4)
    method = build(ring=ring, symmetric=symmetric, entropy=entropy, entropy_weight=0.3, kl_weight=0.7, temperature=0.5)
    views = two_views()
    losses = method(views)
    assert list(losses) == ["contrast", "kl", "entropy"]
    expected = dict.fromkeys(losses, 0.0)
    halves = [views, views[::-1]] if symmetric else [views]
    for anchor_view, query_view in halves:
        q_anchor, q_query = method.encoder(anchor_view), method.encoder(method.saib(query_view))
        k_query = method.key_encoder(method.saib(query_view))
        expected["contrast"] += ring_info_nce(q_anchor, k_query, method.queue.keys, lower=0, upper=90, temperature=0.5)
        scale = math.sqrt(8)
        divergence = gaussian_kl(q_query * scale, q_anchor * scale, variance="diagonal", noise_floor=0.01) / 8
        expected["kl"] += 0.7 * divergence
        expected["entropy"] -= 0.3 * ENTROPIES[entropy](q_query)
    for name, loss in losses.items():
        torch.testing.assert_close(loss, expected[name] / len(halves))


def test_keys_are_of_the_transformed_view():
    method = build()
    views = two_views()
    expected = method.key_encoder(method.saib(views[1]).detach())
    train_step(method, views)
    torch.testing.assert_close(method.queue.keys[:6], expected)


def test_every_term_can_be_left_out():
    views = two_views()
    for options, names in [
        ({"kl_weight": 0.0}, ["contrast", "entropy"]),
        ({"entropy_weight": 0.0}, ["contrast", "kl"]),
        ({"kl_weight": 0.0, "entropy_weight": 0.0}, ["contrast"]),
        ({"saib": False}, ["contrast", "kl", "entropy"]),
    ]:
        assert list(build(**options)(views)) == names


def test_without_block_terms_and_normalisation_it_is_moco():
    options = {**SMALL, "head": "mlp", "temperature": 0.2}
    method = build(Normed, saib=False, spectral=False, entropy_weight=0.0, kl_weight=0.0, **options)
    torch.manual_seed(0)
    moco = MoCo(Normed(), **options)
    assert_same_state(method, moco)
    views = two_views()
    assert torch.equal(method(views)["contrast"], moco(views)["contrast"])


def test_a_block_that_nothing_trains_is_frozen():
    method = build(entropy_weight=0.0)
    assert not any(p.requires_grad for p in method.saib.parameters())
    assert len(method.parameter_groups(0.1)) == 1
    sum(method(two_views()).values()).backward()
    assert all(p.grad is None for p in method.saib.parameters())


def test_the_block_has_a_weight_decay_of_its_own():
    method = build(saib_weight_decay=0.5)
    groups = method.parameter_groups(0.01)
    assert [group["weight_decay"] for group in groups] == [0.01, 0.5]
    assert groups[1]["params"] == list(method.saib.parameters())
    trained = {id(p) for p in method.parameters() if p.requires_grad}
    assert sum(len(group["params"]) for group in groups) == len(trained)
    assert {id(p) for group in groups for p in group["params"]} == trained


def test_running_statistics_are_of_views_as_evaluation_sees_them():
    method = build(Normed, head="mlp")
    views = [torch.randn(16, 3, 4, 4), torch.randn(16, 3, 4, 4) + 5]
    reference = copy.deepcopy(method.encoder)
    reference(views[0])
    method(views)
    ours, alone = method.backbone.norm, reference.backbone.norm
    assert torch.equal(ours.running_mean, alone.running_mean)
    assert torch.equal(ours.running_var, alone.running_var)
    assert ours.track_running_stats
    # ... while the transformed view is normalised by its own statistics, as in any training.
    queries = method._embeddings["queries"]
    torch.testing.assert_close(queries, reference(method.saib(views[1])).detach(), atol=1e-3, rtol=1e-2)


def test_spectral_normalisation_of_both_encoders():
    method = build(Normed)
    optimizer = torch.optim.SGD(method.parameter_groups(0.0), lr=0.1)
    for _ in range(3):
        train_step(method, two_views(), optimizer)
    own = SpectralNormHandle(method.encoder)
    keys = SpectralNormHandle(method.key_encoder.module)
    assert list(own.layers) == list(keys.layers) == ["backbone.conv"]
    for one, other in zip(own.layers.values(), keys.layers.values()):
        for vector in ("_u", "_v"):
            assert torch.equal(
                one.parametrizations.weight[0]._buffers[vector], other.parametrizations.weight[0]._buffers[vector]
            )
    weight = method.eval().backbone.conv.weight.detach().flatten(1)
    assert torch.linalg.matrix_norm(weight, 2).item() == pytest.approx(1, abs=0.05)


def test_the_log_has_each_figure():
    method = build(Normed)
    train_step(method, two_views(16))
    figures = method.diagnostics()
    assert all(type(value) is float and math.isfinite(value) for value in figures.values())
    embeddings = method._embeddings
    assert figures["effective_rank"] == pytest.approx(effective_rank(embeddings["anchors"]).item())
    for name in ("anchor", "query"):
        rows = embeddings[{"anchor": "anchors", "query": "queries"}[name]]
        assert figures[f"entropy_{name}"] == pytest.approx(ENTROPIES["gaussian"](rows).item(), rel=1e-5)
    assert figures["sigma"] == pytest.approx(SpectralNormHandle(method.encoder).sigma()["backbone.conv"].item())
    assert {"ring_lower", "queue_filled", "positive_similarity"} <= figures.keys()
    assert build(saib=False, entropy_weight=0.0, kl_weight=0.0, head="mlp").diagnostics().get("sigma") is None


def test_resume_from_the_state_dict_is_exact():
    def make():
        method = build(Normed, momentum=0.5, ring=RingSchedule(lower=(0, 60), upper=90, steps=6))
        return method, torch.optim.AdamW(method.parameter_groups(0.1), lr=0.01)

    batches = [two_views() for _ in range(6)]
    whole, optimizer = make()
    expected = [{k: v.item() for k, v in train_step(whole, views, optimizer).items()} for views in batches]

    halted, optimizer = make()
    losses = [{k: v.item() for k, v in train_step(halted, views, optimizer).items()} for views in batches[:3]]
    resumed, other = make()
    resumed.load_state_dict(halted.state_dict())
    other.load_state_dict(optimizer.state_dict())
    losses += [{k: v.item() for k, v in train_step(resumed, views, other).items()} for views in batches[3:]]
    assert losses == expected
    assert_same_state(whole, resumed)


def rank_after_training(**weights):
    """The views share two factors and differ in all else, so what tells the images apart has two dimensions."""
    torch.manual_seed(0)
    wide = Flat(48)  # as wide as the image: it can keep or drop every pixel
    method = IECL(wide, dim=16, head="linear", num_keys=64, momentum=0.9, spectral=False, saib=Block(), **weights)
    optimizer = torch.optim.SGD(method.parameter_groups(1e-2), lr=0.05, momentum=0.9)
    directions = torch.linalg.qr(torch.randn(48, 2)).Q.T
    for _ in range(300):
        factors = 6 * torch.randn(32, 2) @ directions
        views = [(factors + 0.7 * torch.randn(32, 48)).view(32, 3, 4, 4) for _ in range(2)]
        train_step(method, views, optimizer)
    with torch.no_grad():
        return effective_rank(method.encoder(views[0])).item()


def test_the_terms_keep_the_rank_up_where_the_contrast_alone_lets_it_fall():
    collapsed = rank_after_training(entropy_weight=0.0, kl_weight=0.0)
    spread = rank_after_training()  # the paper's weights
    assert collapsed < 4
    assert spread > 2 * collapsed


def test_loss_falls():
    torch.manual_seed(0)
    method = IECL(
        Normed(),
        dim=16,
        hidden_dim=32,
        num_keys=64,
        momentum=0.9,
        ring=RingSchedule(lower=0, upper=95, steps=1),
        saib=Block(),
    )
    optimizer = torch.optim.AdamW(method.parameter_groups(1e-4), lr=3e-3)
    losses = []
    for _ in range(120):
        colours = 2 * torch.randn(32, 3, 1, 1)
        views = [colours + torch.randn(32, 3, 4, 4) for _ in range(2)]
        losses.append(sum(train_step(method, views, optimizer).values()).item())
    assert sum(losses[-10:]) < 0.8 * sum(losses[10:20])


@pytest.mark.parametrize("temperature", [0.005, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_finite_under_autocast(temperature, dtype):
    method = build(Normed, temperature=temperature)
    with torch.autocast("cpu", dtype=dtype):
        losses = method(two_views())
    sum(losses.values()).backward()
    assert all(loss.dtype == torch.float32 and loss.isfinite() for loss in losses.values())
    assert all(p.grad.isfinite().all() for p in [*method.encoder.parameters(), *method.saib.parameters()])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"entropy": "renyi"}, "entropy must be one of gaussian, knn, uniformity, got 'renyi'"),
        ({"entropy_weight": -0.1}, "entropy_weight must be at least 0, got -0.1"),
        ({"kl_variance": "batch"}, "kl_variance must be diagonal, full or a positive number, got 'batch'"),
        ({"kl_variance": 0.0}, r"kl_variance must be diagonal, full or a positive number, got 0\.0"),
        ({"kl_weight": math.inf}, "kl_weight must be at least 0, got inf"),
        ({"saib_weight_decay": -1.0}, "saib_weight_decay must be at least 0"),
        ({"hidden_dim": 0}, "hidden_dim must be at least 1, got 0"),
        ({"head": "mlp4"}, "kind must be one of linear, mlp, mlp3, got 'mlp4'"),
    ],
)
def test_errors(options, words):
    with pytest.raises(ValueError, match=words):
        build(**options)
