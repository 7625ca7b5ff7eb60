"""What the CPU works on at once: bands of the images, and slabs of the features, with what a 3x3 convolution reads."""

import torch
from torch import Tensor

from iecl_fast.saib.products import product

_kernels = torch.ops.iecl_fast
_BAND_BYTES = 1 << 18  # of the widest features at once, or half as much as the weights they are multiplied with


class Bands:
    """Parts of the images, each some rows of patches, and the positions of the features that belong to them."""

    def __init__(self, x: Tensor, position: Tensor | None, patch_size: int, channels_are_batch: bool):
        self.position = None if position is None else position.contiguous()  # the kernels read it as an array
        self.options = (patch_size, channels_are_batch)
        self.image_shape, self.channels_are_batch = x.shape, channels_are_batch
        self.grid = feature_grid(x, patch_size, channels_are_batch)
        n, channels, height, _ = x.shape
        self.count = (channels if channels_are_batch else n) * (height // patch_size)
        self.positions = self.grid[0] * self.grid[1] * self.grid[2]
        self.positions_each = self.positions // max(self.count, 1)
        bytes_of_position = 2 * self.grid[3] * x.element_size()
        positions = max(_BAND_BYTES // max(bytes_of_position, 1), self.grid[3])
        self.step = max(1, positions // max(self.positions_each, 1))

    def __iter__(self):
        """Each part and its slice of the positions."""
        return self.parts(0, self.count)

    def parts(self, begin: int, end: int):
        """The bands begin .. end - 1 in parts of about one size."""
        count = -(-(end - begin) // self.step)
        for i in range(count):
            part = begin + (end - begin) * i // count, begin + (end - begin) * (i + 1) // count
            yield part, slice(part[0] * self.positions_each, part[1] * self.positions_each)

    def slabs(self, count: int) -> list["Slab"]:
        """All bands in up to so many slabs, each of whole pairs of rows or whole images."""
        _, height, width, _ = self.grid
        rows_each = self.positions_each // width
        unit = 1 + rows_each % 2 if self.channels_are_batch else height
        step = -(-self.count // (count * unit)) * unit
        return [Slab(self, begin, min(begin + step, self.count)) for begin in range(0, self.count, step)]

    def features(self, image: Tensor, part: tuple[int, int], positioned: bool = False) -> Tensor:
        """patchify(image) [+ position] of a part: (positions, channels)."""
        features = _kernels._saib_gather(image, self.position if positioned else None, *self.options, *part)
        return features.T if self.channels_are_batch else features

    def write(self, image, features, weight, part, result, positioned: bool = False) -> None:
        """result = 2 image + unpatchify(features @ weight [+ position]) of a part."""
        # The product comes in the order of the image's memory.
        branch = product(weight.T, features.T) if self.channels_are_batch else product(features, weight)
        _kernels._saib_scatter(image, self.position if positioned else None, branch, *self.options, *part, result)


class Slab:
    """The bands begin .. end - 1, and the rows next to them that a 3x3 convolution of their rows reads.

    Where the channels are the batch, all features are one image, and a slab is some of its rows. Its window begins two
    rows higher, so that pairs of rows stay pairs, and ends one row lower; the first of these three is never read. Else
    a slab is whole images, and so is its window.
    """

    def __init__(self, bands: Bands, begin: int, end: int):
        _, height, width, _ = bands.grid
        self.begin, self.end = begin, end
        start, stop = begin * bands.positions_each, end * bands.positions_each
        above = 2 * width if bands.channels_are_batch and begin > 0 else 0
        below = width if bands.channels_are_batch and end < bands.count else 0
        self.window = slice(start - above, stop + below)  # of the positions
        self.own = self.inside(slice(start, stop))
        self.positions = self.window.stop - self.window.start
        rows = self.positions // width
        self.grid = (1, rows, width) if bands.channels_are_batch else (rows // height, height, width)
        # Pairs of rows in the window that are the slab's own, those of all images counted through.
        first, pairs = above // (2 * width), (height + 1) // 2 * self.grid[0]
        if bands.channels_are_batch:
            pairs = ((stop - start) // width + 1) // 2
        self.tile_rows = first, first + pairs
        # The rows that are not: the band that has them, their place in it, and among all positions.
        self.neighbours = []
        if above:
            self.neighbours.append(((begin - 1, begin), slice(-width, None), slice(start - width, start)))
        if below:
            self.neighbours.append(((end, end + 1), slice(0, width), slice(stop, stop + width)))

    def inside(self, here: slice) -> slice:
        """A slice of the positions, in the window."""
        return slice(here.start - self.window.start, here.stop - self.window.start)


def feature_grid(x: Tensor, patch_size: int, channels_are_batch: bool) -> tuple[int, int, int, int]:
    """Images, height, width and channels of the features."""
    n, channels, height, width = x.shape
    rows, columns = height // patch_size, width // patch_size
    if channels_are_batch:
        return 1, channels * rows * columns, patch_size**2, n
    return n, rows, columns, channels * patch_size**2
