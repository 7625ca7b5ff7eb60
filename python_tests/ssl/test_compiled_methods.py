"""Methods with a block and spectral norm compile as a whole, BatchNorm's notes of the views included."""

import copy

import pytest
import torch

from iecl_fast.ssl import build_method
from toys import Block, Normed, assert_same_state, train_step, two_views

OPTIONS = {
    "moco": {"num_keys": 16},
    "iecl": {"num_keys": 16, "hidden_dim": 16, "symmetric": True},
    "simclr": {},
    "byol": {"hidden_dim": 16},
    "simsiam": {"hidden_dim": 16},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_compiled_gives_the_eager_results(name):
    torch.manual_seed(0)
    torch._dynamo.reset()
    eager = build_method(name, Normed(), dim=8, spectral=True, saib=Block(), **OPTIONS[name])
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
