"""Backbones and batches for tests of methods with a memory bank."""

import torch
from torch import nn


class Pixels(nn.Module):
    """A backbone without BatchNorm: one linear layer on the pixels of a (channels, 4, 4) image."""

    feature_dim = 12

    def __init__(self, channels=3):
        super().__init__()
        self.linear = nn.Linear(16 * channels, 12)

    def forward(self, images):
        return self.linear(images.flatten(1))


def images(n=6):
    return torch.randn(n, 3, 4, 4)


def train_step(method, views, index, optimizer=None):
    losses = method(views, index)
    sum(losses.values()).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    method.after_step()
    return {name: loss.item() for name, loss in losses.items()}


def assert_resumes_exactly(build, steps=6, halt_at=3):
    """A method restored from its state_dict and the random state, in mid-anneal, goes on with the same bits."""
    torch.manual_seed(0)
    batches = [(images(), torch.randint(0, 20, (6,))) for _ in range(steps)]
    whole, halted = build(), build()
    halted.load_state_dict(whole.state_dict())

    def run(method, batches, seed):
        torch.random.set_rng_state(seed)
        optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=0.1)
        losses = [train_step(method, [view], index, optimizer) for view, index in batches]
        return losses, torch.random.get_rng_state()

    start = torch.random.get_rng_state()
    expected, _ = run(whole, batches, start)
    losses, state = run(halted, batches[:halt_at], start)
    resumed = build()
    resumed.load_state_dict(halted.state_dict())
    rest, _ = run(resumed, batches[halt_at:], state)
    assert losses + rest == expected
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
