"""What the SAIB operators compute, in plain PyTorch, any device, any dtype: what every kernel is tested against.

Zhang et al., "Maximizing Incremental Information Entropy for Contrastive Learning", section on SAIB. What is meant, and
where the paper leaves a choice, is told in module.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {"relu": F.relu, "silu": F.silu}


def patchify(x: Tensor, patch_size: int) -> Tensor:
    """(N, C, H, W) to (N, R, p*p), R = C * (H/p) * (W/p): a row for each channel of each patch.

    Rows are ordered by channel, then by the patch's place in the image, row by row: those of nn.Unfold, transposed.
    """
    n, channels, height, width = x.shape
    p = patch_size
    cells = x.reshape(n, channels, height // p, p, width // p, p)
    return cells.transpose(3, 4).reshape(n, channels * (height // p) * (width // p), p * p)


def unpatchify(patches: Tensor, patch_size: int, channels: int, height: int, width: int) -> Tensor:
    """(N, R, p*p) to (N, C, H, W): the inverse of patchify."""
    p = patch_size
    cells = patches.reshape(len(patches), channels, height // p, width // p, p, p)
    return cells.transpose(3, 4).reshape(len(patches), channels, height, width)


def to_channels(patches: Tensor, patch_size: int, image_shape: torch.Size, channels_are_batch: bool) -> Tensor:
    """What the convolutions see of (N, R, p*p): (1, N, R, p*p), or (N, C*p*p, H/p, W/p)."""
    if channels_are_batch:
        return patches[None]
    n, channels, height, width = image_shape
    grid = patches.reshape(n, channels, height // patch_size, width // patch_size, patch_size**2)
    return grid.permute(0, 1, 4, 2, 3).flatten(1, 2)


def from_channels(features: Tensor, patch_size: int, image_shape: torch.Size, channels_are_batch: bool) -> Tensor:
    """The inverse of to_channels: (N, R, p*p)."""
    if channels_are_batch:
        return features[0]
    grid = features.unflatten(1, (image_shape[1], patch_size**2))
    return grid.permute(0, 1, 3, 4, 2).flatten(1, 3)


def saib(
    x: Tensor,
    position: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    w4: Tensor | None,
    patch_size: int,
    channels_are_batch: bool,
    activation: str,
    expansion: str,
) -> Tensor:
    """X' = X + unpatchify(P + A(P)): (N, C, H, W)."""
    act = ACTIVATIONS[activation]
    patches = patchify(x, patch_size)
    if position is not None:
        patches = patches + position
    p = to_channels(patches, patch_size, x.shape, channels_are_batch)
    if expansion == "free":
        h1 = act(F.conv2d(p, w1))
        h2 = act(F.conv2d(h1, w2, padding=1))
        h3 = act(F.conv2d(h2, w3))
        branch = F.conv2d(h3, w4)
    else:  # M^T act(M P), M = w3 w2 w1
        a = act(F.conv2d(F.conv2d(F.conv2d(p, w1), w2, padding=1), w3))
        branch = F.conv_transpose2d(F.conv_transpose2d(F.conv_transpose2d(a, w3), w2, padding=1), w1)
    patches = patches + from_channels(branch, patch_size, x.shape, channels_are_batch)
    return x + unpatchify(patches, patch_size, *x.shape[1:])
