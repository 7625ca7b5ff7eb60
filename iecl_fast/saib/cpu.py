"""Forward and backward pass on the CPU, float32.

All products of matrices and narrow 3x3 convolutions are torch's own. Features lie as (positions, channels), so that the
1x1 convolutions are plain products. Whatever is between images and features is done band by band (rows of patches),
beside the products and while it lies in a cache: no pass over memory of its own lays anything out.

"free" saves h2 alone ("silu": what it is the activation of), 2 D floats a position. h3 is computed again, band by band,
for 4 D^2 of the forward pass' 25 D^2 multiplications a position, and never exists as a whole; h1 twice, for D^2 each:
for the gradient of w2, and again when the gradient of h1 has come. "monotone" saves W1 P, W2 W1 P and
W2^T W3^T act(M P), 4 D floats a position.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from iecl_fast.saib import reference
from iecl_fast.saib.convolution import add_weight_gradient, convolve, convolve_transposed, is_narrow
from iecl_fast.saib.products import add_product, product

_kernels = torch.ops.iecl_fast
_BAND_BYTES = 1 << 18  # of the widest features at once, or half as much as the weights they are multiplied with
_SLABS = 3  # of the backward pass


class _Bands:
    """Parts of the images, each some rows of patches, and the positions of the features that belong to them."""

    def __init__(self, x: Tensor, position: Tensor | None, patch_size: int, channels_are_batch: bool):
        self.position, self.options = position, (patch_size, channels_are_batch)
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
        """The same of the bands begin .. end - 1, in parts of about one size."""
        count = -(-(end - begin) // self.step)
        for i in range(count):
            part = begin + (end - begin) * i // count, begin + (end - begin) * (i + 1) // count
            yield part, slice(part[0] * self.positions_each, part[1] * self.positions_each)

    def slabs(self):
        """All bands in slabs that begin with a tile of the 3x3 convolution: pairs of rows, or whole images."""
        images, height, width, _ = self.grid
        if not self.channels_are_batch:
            unit = height
        else:
            unit = 1 if self.positions_each // max(width, 1) % 2 == 0 else 2
        step = -(-self.count // (_SLABS * unit)) * unit
        for begin in range(0, self.count, step):
            yield _Slab(self, begin, min(begin + step, self.count))

    def features(self, image: Tensor, part: tuple[int, int], positioned: bool = False) -> Tensor:
        """patchify(image) [+ position] of a part: (positions, channels)."""
        features = _kernels._saib_gather(image, self.position if positioned else None, *self.options, *part)
        return features.T if self.channels_are_batch else features

    def write(self, image, features, weight, part, result, positioned: bool = False) -> None:
        """result = 2 image + unpatchify(features @ weight [+ position]) of a part."""
        # The product comes in the order of the image's memory.
        branch = product(weight.T, features.T) if self.channels_are_batch else product(features, weight)
        _kernels._saib_scatter(image, self.position if positioned else None, branch, *self.options, *part, result)


class _Slab:
    """The bands begin .. end - 1, and what a 3x3 convolution sees of their neighbours.

    Where the channels are the batch, all features are one image, and a slab some of its rows: its window has two rows
    more above, so that tiles stay where they are, and one below, of which two are written. Else a slab is whole images.
    """

    def __init__(self, bands: _Bands, begin: int, end: int):
        images, height, width, _ = bands.grid
        self.begin, self.end = begin, end
        self.here = slice(begin * bands.positions_each, end * bands.positions_each)
        above = 2 * width if bands.channels_are_batch and begin > 0 else 0
        below = width if bands.channels_are_batch and end < bands.count else 0
        self.first = self.here.start - above  # position of the window
        self.own = slice(above, above + self.here.stop - self.here.start)
        self.positions = self.own.stop + below
        rows = self.positions // width
        self.grid = (1, rows, width) if bands.channels_are_batch else (rows // height, height, width)
        first_tile = above // (2 * width)
        own_rows = (self.own.stop - above) // width
        pairs = (own_rows + 1) // 2 if bands.channels_are_batch else self.grid[0] * ((height + 1) // 2)
        self.tile_rows = first_tile, first_tile + pairs
        # Rows of others: the band that they are part of, their place in it and in the window.
        self.neighbours = []
        if above:
            self.neighbours.append(((begin - 1, begin), slice(-width, None), slice(width, 2 * width)))
        if below:
            self.neighbours.append(((end, end + 1), slice(0, width), slice(self.own.stop, self.positions)))

    def inside(self, here: slice) -> slice:
        """A slice of the positions, in the window."""
        return slice(here.start - self.first, here.stop - self.first)


class _InputGradients:
    """The gradients of x, position and w1, given that of W1's results slab by slab."""

    def __init__(self, bands: _Bands, gradient: Tensor, x: Tensor, w1: Tensor, needs):
        self.bands, self.gradient, self.x, self.w1 = bands, gradient, x, w1
        self.of_x = torch.empty_like(x) if needs[0] else None
        self.of_position = self._of_skip() if needs[1] else None
        self.of_w1 = torch.zeros_like(w1) if needs[2] else None
        self.sums = x.new_zeros(bands.positions // max(len(x), 1), bands.grid[3]) if needs[1] else None

    def _of_skip(self) -> Tensor:
        gradient = self.gradient
        if gradient.stride(0) < gradient[0].numel():
            gradient = gradient.contiguous()  # the order of the sum is that of the layout
        return reference.patchify(gradient.sum(0, keepdim=True), self.bands.options[0])[0]

    def add(self, begin: int, end: int, of_t1: Tensor) -> None:
        """of_t1: (positions of the bands begin .. end - 1, D), where channels are not the batch those of whole images."""
        start = begin * self.bands.positions_each
        for part, here in self.bands.parts(begin, end):
            slope = of_t1[here.start - start : here.stop - start]
            if self.of_w1 is not None:
                add_product(self.of_w1, slope.T, self.bands.features(self.x, part, positioned=True))
            if self.of_x is not None:
                self.bands.write(self.gradient, slope, self.w1, part, self.of_x)
        if self.of_position is None:
            return
        if self.bands.channels_are_batch:
            self.of_position.view(-1)[start : start + len(of_t1)] += torch.mv(of_t1, self.w1.sum(1))
        else:
            self.sums += of_t1.view(-1, *self.sums.shape).sum(0)

    def results(self) -> list[Tensor | None]:
        if self.of_position is not None and not self.bands.channels_are_batch:
            patch_size, _ = self.bands.options
            features = product(self.sums, self.w1).T.reshape(1, -1, *self.bands.grid[1:3])
            self.of_position += reference.from_channels(features, patch_size, self.bands.image_shape, False)[0]
        return [self.of_x, self.of_position, self.of_w1]


def feature_grid(x: Tensor, patch_size: int, channels_are_batch: bool) -> tuple[int, int, int, int]:
    """Images, height, width and channels of the features."""
    n, channels, height, width = x.shape
    rows, columns = height // patch_size, width // patch_size
    if channels_are_batch:
        return 1, channels * rows * columns, patch_size**2, n
    return n, rows, columns, channels * patch_size**2


def empty_saved(x, w1, patch_size, channels_are_batch, activation, expansion) -> list[Tensor]:
    """Tensors of the shapes that ``forward`` saves."""
    images, height, width, channels = feature_grid(x, patch_size, channels_are_batch)
    factors = (1, 2) if expansion == "free" else (1, 2, 1)
    return [x.new_empty(images * height * width, factor * channels) for factor in factors]


def forward(x, position, w1, w2, w3, w4, patch_size, channels_are_batch, activation, expansion, save):
    bands = _Bands(x, position, patch_size, channels_are_batch)
    run = _free_forward if expansion == "free" else _monotone_forward
    output = torch.empty_like(x)
    saved = run(x, bands, w1.flatten(1), w2.contiguous(), w3.flatten(1), w4, activation, save, output)
    return output, saved if save else []


def backward(
    gradient, x, position, w1, w2, w3, w4, saved, patch_size, channels_are_batch, activation, expansion, needs
):
    """Gradients of those of x, position, w1, w2, w3, w4 that ``needs`` names, in this order."""
    likes = (x, position, w1, w2, w3, w4)
    if x.numel() == 0:
        return [torch.zeros_like(like) for like, needed in zip(likes, needs) if needed]
    bands = _Bands(x, position, patch_size, channels_are_batch)
    run = _free_backward if expansion == "free" else _monotone_backward
    weights = w1.flatten(1), w2.contiguous(), w3.flatten(1), w4
    inputs = _InputGradients(bands, gradient, x, weights[0], needs)
    of_weights = run(gradient, x, bands, *weights, saved, activation, needs, inputs)
    gradients = [*inputs.results(), *of_weights]
    return [_laid_out_as(own, like) for own, like, needed in zip(gradients, likes, needs) if needed]


# ---- free ----------------------------------------------------------------------------------------------------------


def _free_forward(x, bands, w1, w2, w3, w4, activation, save, output):
    relu = activation == "relu"
    s1 = x.new_empty(bands.positions, len(w1))
    for part, here in bands:
        product(bands.features(x, part, positioned=True), w1.T, out=s1[here])
        if relu:
            s1[here].relu_()
    h1 = s1 if relu else F.silu(s1)
    s2 = convolve(h1.view(bands.grid), w2, relu).flatten(0, 2)
    del h1
    for part, here in bands:
        h3 = _activate_(product(s2[here] if relu else F.silu(s2[here]), w3.T), relu)
        bands.write(x, h3, w4.flatten(1).T, part, output, positioned=True)
    return [s1, s2]


def _free_backward(gradient, x, bands, w1, w2, w3, w4, saved, activation, needs, inputs):
    """The gradients of w2, w3, w4; ``inputs`` gets those of W1's results."""
    taps = w2.new_zeros(9, *w2.shape[:2]) if needs[3] else None
    of_w3, of_w4 = (torch.zeros_like(w) if needed else None for w, needed in ((w3, needs[4]), (w4.flatten(1), needs[5])))
    block = _FreeBlock(gradient, bands, w2, w3, w4.flatten(1), *saved, activation == "relu")
    for slab in bands.slabs() if not is_narrow(w2) else [_Slab(bands, 0, bands.count)]:
        inputs.add(slab.begin, slab.end, block.backward(slab, taps, of_w3, of_w4))
    return _weight_of(taps), of_w3, of_w4


@dataclass(frozen=True)
class _FreeBlock:
    """Gradients of a slab: nothing that is made for it outlives it."""

    gradient: Tensor
    bands: _Bands
    w2: Tensor
    w3: Tensor
    w4: Tensor
    s1: Tensor
    s2: Tensor
    relu: bool

    def backward(self, slab: _Slab, taps: Tensor | None, of_w3: Tensor | None, of_w4: Tensor | None) -> Tensor:
        """The gradient of W1's results; adds to those of the weights."""
        of_s2 = self.s2.new_empty(slab.positions, self.s2.shape[1])
        for part, here in self.bands.parts(slab.begin, slab.end):
            slope = self.bands.features(self.gradient, part)
            self._through_third(slope, self.s2[here], of_s2[slab.inside(here)], of_w3, of_w4)
        for part, rows, window in slab.neighbours:
            here = slice(slab.first + window.start, slab.first + window.stop)
            self._through_third(self.bands.features(self.gradient, part)[rows], self.s2[here], of_s2[window])
        of_s2 = of_s2.view(*slab.grid, -1)
        s1 = self.s1[slab.first : slab.first + slab.positions]
        if taps is not None:
            h1 = s1 if self.relu else F.silu(s1)
            add_weight_gradient(taps, of_s2, h1.view(*slab.grid, -1), self.w2, slab.tile_rows)
        of_h1 = convolve_transposed(of_s2, self.w2, slab.tile_rows).flatten(0, 2)
        return _through_activation_(of_h1[slab.own], s1[slab.own], self.relu)

    def _through_third(self, slope: Tensor, s2: Tensor, of_s2: Tensor, of_w3=None, of_w4=None) -> None:
        h2 = s2 if self.relu else F.silu(s2)
        s3 = product(h2, self.w3.T)
        h3 = s3.relu_() if self.relu else F.silu(s3)
        if of_w4 is not None:
            add_product(of_w4, slope.T, h3)
        of_s3 = _through_activation_(product(slope, self.w4), s3, self.relu)
        if of_w3 is not None:
            add_product(of_w3, of_s3.T, h2)
        _through_activation_(product(of_s3, self.w3, out=of_s2), s2, self.relu)


def _activate_(features: Tensor, relu: bool) -> Tensor:
    return features.relu_() if relu else F.silu(features, inplace=True)


def _through_activation_(gradient: Tensor, features: Tensor, relu: bool) -> Tensor:
    """The gradient before an activation, in place of that behind it."""
    if relu:
        return torch.ops.aten.threshold_backward.grad_input(gradient, features, 0, grad_input=gradient)
    return torch.ops.aten.silu_backward.grad_input(gradient, features, grad_input=gradient)


# ---- monotone ------------------------------------------------------------------------------------------------------


def _monotone_forward(x, bands, w1, w2, w3, w4, activation, save, output):
    t1 = x.new_empty(bands.positions, len(w1))
    for part, here in bands:
        product(bands.features(x, part, positioned=True), w1.T, out=t1[here])
    t2 = convolve(t1.view(bands.grid), w2)
    u2 = torch.empty_like(t2)
    t2, flat_u2 = t2.flatten(0, 2), u2.flatten(0, 2)
    for _, here in bands:
        product(product(t2[here], w3.T).relu_(), w3, out=flat_u2[here])
    u1 = convolve_transposed(u2, w2).flatten(0, 2)
    for part, here in bands:
        bands.write(x, u1[here], w1, part, output, positioned=True)
    return [t1, t2, u1]


def _monotone_backward(gradient, x, bands, w1, w2, w3, w4, saved, activation, needs, inputs):
    """M is used forwards, on P, and backwards, on act(M P). The gradient of the latter runs forwards through M."""
    t1, t2, u1 = saved
    of_w3 = torch.zeros_like(w3)
    v1 = torch.empty_like(t1)
    for part, here in bands:
        slope = bands.features(gradient, part)
        product(slope, w1.T, out=v1[here])
        if needs[2]:
            add_product(inputs.of_w1, u1[here].T, slope)
    v1 = v1.view(bands.grid)
    v2 = convolve(v1, w2)
    u2 = torch.empty_like(v2)
    flat_v2, flat_u2 = v2.flatten(0, 2), u2.flatten(0, 2)
    for _, here in bands:
        a = product(t2[here], w3.T).relu_()
        product(a, w3, out=flat_u2[here])
        of_z = _through_activation_(product(flat_v2[here], w3.T), a, relu=True)
        add_product(of_w3, a.T, flat_v2[here])
        add_product(of_w3, of_z.T, t2[here])
        product(of_z, w3, out=flat_v2[here])  # v2 has done its part and becomes the gradient of W2 W1 P
    taps = w2.new_zeros(9, *w2.shape[:2]) if needs[3] else None
    if taps is not None:
        add_weight_gradient(taps, u2, v1, w2)
        add_weight_gradient(taps, v2, t1.view(bands.grid), w2)
    del u2, flat_u2, v1
    inputs.add(0, bands.count, convolve_transposed(v2, w2).flatten(0, 2))
    return _weight_of(taps), of_w3, None


def _weight_of(taps: Tensor | None) -> Tensor | None:
    """(9, E, D) to (E, D, 3, 3)."""
    return None if taps is None else taps.permute(1, 2, 0).contiguous().unflatten(2, (3, 3))


def _laid_out_as(tensor: Tensor, like: Tensor) -> Tensor:
    tensor = tensor.view(like.shape)
    result = torch.empty_like(like)
    return tensor if tensor.stride() == result.stride() else result.copy_(tensor)
