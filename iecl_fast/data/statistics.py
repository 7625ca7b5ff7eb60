"""Mean and deviation of the pixels of a data set."""

from collections.abc import Iterable

import torch
from torch import Tensor


def channel_statistics(batches: Iterable[Tensor]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel over all pixels of all images, as of values in 0..1.

    The pixels are counted by their value, 256 whole numbers for each channel, from which both follow in float64: the
    figures are exact, whatever the order of the images and the size of the batches, and nothing but the counts is held.

    Args:
        batches: uint8 (N, 3, H, W), at least one pixel in all.

    Returns:
        means, and deviations of the population; 1 for a channel that is the same everywhere, which is only shifted.
    """
    counts = torch.zeros(3, 256, dtype=torch.int64)
    for images in batches:
        for channel, values in enumerate(images.unbind(dim=1)):
            counts[channel] += torch.bincount(values.flatten().long(), minlength=256)
    weights = counts.double() / counts.sum(dim=1, keepdim=True)
    levels = torch.arange(256, dtype=torch.float64) / 255
    means = weights @ levels
    deviations = (weights * (levels - means[:, None]).square()).sum(dim=1).sqrt()
    deviations = torch.where((counts > 0).sum(dim=1) == 1, 1.0, deviations)
    return tuple(means.tolist()), tuple(deviations.tolist())
