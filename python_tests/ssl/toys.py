"""Small networks, views and a block for the tests of the methods."""

import torch
from torch import nn


class Flat(nn.Module):
    """A backbone without BatchNorm: one linear layer on the 48 pixels of a (3, 4, 4) image."""

    def __init__(self, feature_dim=24):
        super().__init__()
        self.feature_dim = feature_dim
        self.linear = nn.Linear(48, feature_dim)

    def forward(self, images):
        return self.linear(images.flatten(1))


class Normed(nn.Module):
    """A backbone with a convolution and BatchNorm, for images of any size."""

    feature_dim = 8

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, images):
        return self.norm(self.conv(images)).relu().mean(dim=(2, 3))


class Block(nn.Module):
    """In place of SAIB: a residual 1x1 convolution."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1, bias=False)

    def forward(self, images):
        return 2 * images + self.conv(images)


def two_views(n=6, size=4):
    return [torch.randn(n, 3, size, size) for _ in range(2)]


def train_step(method, views, optimizer=None):
    losses = method(views, torch.arange(len(views[0])))
    sum(losses.values()).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    method.after_step()
    return losses


def assert_same_state(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
