"""views.png: what SAIB makes of the query views."""

import math

import numpy as np
import torch

from iecl_fast.engine.figures import png_figure
from iecl_fast.evaluate.features import frozen

SHOWN = 8


class QueryViews:
    """A few query views, always the same ones, before and after SAIB.

    Args:
        views: `ViewsDataset`, whose second view SAIB transforms. Of a block for whole batches it is asked for a batch.
        batch_size: images of a batch.
        whole_batch: whether the block takes whole batches alone.
        mean, std: of the standardisation, per channel.
    """

    def __init__(self, views, *, batch_size, whole_batch, mean, std):
        count = batch_size if whole_batch else min(SHOWN, len(views))
        self.images = torch.stack([views[index % len(views)][0][1] for index in range(count)])
        self._mean, self._std = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))

    def rows(self, saib, device):
        """Three rows of pictures (rows, n, 3, H, W) in 0..1: before, after, and what the block has added.

        SAIB's last skip doubles the images and its branch shifts them. The encoder's first batch norm takes both away,
        and so do these pictures: each transformed image has the channels' mean and deviation that it had before. The
        third row is the difference of the two, around grey.
        """
        with frozen(saib):
            after = saib(self.images.to(device)).float().cpu()[:SHOWN]
        before = self.images[:SHOWN]
        deviation, mean = torch.std_mean(after, dim=(2, 3), keepdim=True)
        own_deviation, own_mean = torch.std_mean(before, dim=(2, 3), keepdim=True)
        after = (after - mean) / deviation.clamp_min(1e-6) * own_deviation + own_mean
        difference = 0.5 + (after - before) * self._std
        pictures = [before * self._std + self._mean, after * self._std + self._mean, difference]
        return torch.stack(pictures).clamp(0, 1)


def tile(rows):
    """Rows of pictures (rows, n, 3, H, W) as one picture (3, height, width), white between them."""
    gap = max(1, rows.shape[-1] // 16)
    padded = torch.nn.functional.pad(rows, (gap, gap, gap, gap), value=1.0)
    return torch.cat([torch.cat(list(row), dim=2) for row in padded], dim=1)


def draw_views(rows, path, title=""):
    """Write rows of pictures, as `QueryViews.rows` gives them, as a PNG file."""
    picture = tile(rows).permute(1, 2, 0).numpy()
    height, width = picture.shape[:2]
    size, dpi = (10, 10 * height / width + 0.5), max(120, math.ceil(width / 10))
    with png_figure(path, size=size, dpi=dpi) as figure:
        figure.suptitle(title)
        axes = figure.add_subplot()
        axes.imshow(picture, interpolation="nearest")
        axes.set_xticks([])
        labels = ("view", "after SAIB,\nrescaled", "difference")
        axes.set_yticks((np.arange(3) + 0.5) * height / 3, labels)
        axes.tick_params(length=0)
