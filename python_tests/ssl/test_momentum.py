import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from iecl_fast.ssl import MomentumEncoder


def network():
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def perturb(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))


def test_starts_as_a_frozen_copy():
    online = network()
    momentum = MomentumEncoder(online)
    assert all(not p.requires_grad for p in momentum.parameters())
    assert all(p.requires_grad for p in online.parameters())
    out = momentum(torch.randn(4, 3, requires_grad=True))
    assert not out.requires_grad
    perturb(online)
    assert not torch.equal(momentum.module[0].weight, online[0].weight)
    assert "momentum=0.999" in repr(momentum)


@pytest.mark.parametrize("m", [0.0, 0.9, 1.0])
def test_update_is_the_moving_average(m):
    online = network()
    momentum = MomentumEncoder(online, m)
    old = copy.deepcopy(momentum.module.state_dict())
    perturb(online)
    momentum.update(online)
    for name, parameter in momentum.module.named_parameters():
        expected = m * old[name] + (1 - m) * dict(online.named_parameters())[name]
        torch.testing.assert_close(parameter, expected, atol=1e-6, rtol=0)


def test_batch_norm_statistics_stay_the_branchs_own():
    online = network()
    momentum = MomentumEncoder(online, 0.5)
    online(torch.randn(16, 3) + 5)
    momentum(torch.randn(16, 3) - 5)
    before = momentum.module[1].running_mean.clone()
    momentum.update(online)
    assert torch.equal(momentum.module[1].running_mean, before)
    assert not torch.equal(before, online[1].running_mean)
    assert momentum.module[1].num_batches_tracked == 1


def test_pairs_by_name_not_by_order():
    online = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    momentum = MomentumEncoder(online, 0.0)
    perturb(online)
    momentum.update(nn.ModuleDict({"b": online["b"], "a": online["a"]}))
    assert torch.equal(momentum.module["a"].weight, online["a"].weight)
    assert torch.equal(momentum.module["b"].weight, online["b"].weight)


def test_normalising_one_side_only_is_an_error():
    # Paired by position a square layer would take the other's weight silently.
    online = nn.Sequential(nn.Linear(3, 3))
    momentum = MomentumEncoder(online)
    spectral_norm(online[0])
    before = momentum.module[0].weight.clone()
    with pytest.raises(ValueError, match=r"0\.weight exists only in the momentum encoder"):
        momentum.update(online)
    assert torch.equal(momentum.module[0].weight, before)
    with pytest.raises(ValueError, match=r"1\.weight exists only in the online encoder"):
        momentum.update(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))


def test_broadcastable_shapes_are_an_error():
    momentum = MomentumEncoder(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"weight has different shapes .*: \(3, 3\) and \(1, 3\)"):
        momentum.update(nn.Linear(3, 1))


def test_spectral_vectors_are_copied_never_averaged():
    online = nn.Sequential(spectral_norm(nn.Linear(4, 3)))
    momentum = MomentumEncoder(online, 0.5)
    weight = "0.parametrizations.weight.original"
    old = momentum.module.state_dict()[weight].clone()
    perturb(online)
    for _ in range(3):
        online(torch.randn(2, 4))
    momentum.update(online)
    new, theirs = momentum.module.state_dict(), online.state_dict()
    torch.testing.assert_close(new[weight], (old + theirs[weight]) / 2)
    for vector in ("0.parametrizations.weight.0._u", "0.parametrizations.weight.0._v"):
        assert torch.equal(new[vector], theirs[vector])


def test_momentum_outside_its_range():
    with pytest.raises(ValueError, match=r"momentum must lie in 0\.\.1, got 1\.5"):
        MomentumEncoder(nn.Linear(2, 2), 1.5)
