"""Forward and backward pass on the CPU, float32.

All products of matrices and narrow 3x3 convolutions are torch's own. Features lie as (positions, channels), so that the
1x1 convolutions are plain products. Whatever is between images and features is done band by band (rows of patches),
beside the products and while it lies in a cache: no pass over memory of its own lays anything out.

"free" saves h1 and h2 ("silu": what they are the activations of), 3 D floats a position. h3 is computed again, band by
band, for 4 D^2 of the forward pass' 25 D^2 multiplications a position, and never exists as a whole. Nor do gradients of
features: the backward pass goes through the 3x3 slab by slab, and computes the two rows of the gradient of h2 twice in
which slabs overlap. "monotone" saves W1 P, W2 W1 P and W2^T W3^T act(M P), 4 D floats a position.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from iecl_fast.saib import reference
from iecl_fast.saib.bands import Bands, Slab, feature_grid
from iecl_fast.saib.convolution import add_weight_gradient, convolve, convolve_transposed, is_narrow
from iecl_fast.saib.products import add_product, product

_SLABS = 3  # of the backward pass: more take less memory, but each transforms the weights of the 3x3 again


class _InputGradients:
    """The gradients of x, position and w1, given that of W1's results slab by slab."""

    def __init__(self, bands: Bands, gradient: Tensor, x: Tensor, w1: Tensor, needs):
        self.bands, self.gradient, self.x, self.w1 = bands, gradient, x, w1
        self.of_x = torch.empty_like(x) if needs[0] else None
        self.of_w1 = torch.zeros_like(w1) if needs[2] else None
        self.of_position = self.sums = self.sums_of_w1 = None
        if needs[1]:
            self.of_position = self._of_skip()
            if bands.channels_are_batch:
                self.sums_of_w1 = w1.sum(1)  # summed up over the images before the product, not after it
            else:
                self.sums = x.new_zeros(bands.positions // len(x), bands.grid[3])  # over the images

    def _of_skip(self) -> Tensor:
        gradient = self.gradient
        if gradient.stride(0) < gradient[0].numel():
            gradient = gradient.contiguous()  # the order of the sum is that of the layout
        return reference.patchify(gradient.sum(0, keepdim=True), self.bands.options[0])[0]

    def add(self, begin: int, end: int, of_t1: Tensor) -> None:
        """of_t1: (positions of the bands begin .. end - 1, D). In patch mode these are whole images."""
        start = begin * self.bands.positions_each
        for part, here in self.bands.parts(begin, end):
            slope = of_t1[here.start - start : here.stop - start]
            if self.of_w1 is not None:
                add_product(self.of_w1, slope.T, self.bands.features(self.x, part, positioned=True))
            if self.of_x is not None:
                self.bands.write(self.gradient, slope, self.w1, part, self.of_x)
            if self.sums_of_w1 is not None:
                # The bits of torch.mv depend on how the positions are shared out among threads.
                self.of_position.view(-1)[here] += (slope * self.sums_of_w1).sum(1)
        if self.sums is not None:
            self.sums += of_t1.view(-1, *self.sums.shape).sum(0)

    def results(self) -> list[Tensor | None]:
        if self.sums is not None:
            patch_size, _ = self.bands.options
            features = product(self.sums, self.w1).T.reshape(1, -1, *self.bands.grid[1:3])
            self.of_position += reference.from_channels(features, patch_size, self.bands.image_shape, False)[0]
        return [self.of_x, self.of_position, self.of_w1]


def empty_saved(x, w1, patch_size, channels_are_batch, activation, expansion) -> list[Tensor]:
    """Tensors of the shapes that ``forward`` saves."""
    images, height, width, channels = feature_grid(x, patch_size, channels_are_batch)
    factors = (1, 2) if expansion == "free" else (1, 2, 1)
    return [x.new_empty(images * height * width, factor * channels) for factor in factors]


def forward(x, position, w1, w2, w3, w4, patch_size, channels_are_batch, activation, expansion, save):
    bands = Bands(x, position, patch_size, channels_are_batch)
    run = _free_forward if expansion == "free" else _monotone_forward
    output = torch.empty_like(x)
    saved = run(x, bands, w1.flatten(1), w2.contiguous(), w3.flatten(1), w4, activation, save, output)
    return output, saved


def backward(
    gradient, x, position, w1, w2, w3, w4, saved, patch_size, channels_are_batch, activation, expansion, needs
):
    """Gradients of those of x, position, w1, w2, w3, w4 that ``needs`` names, in this order."""
    likes = (x, position, w1, w2, w3, w4)
    if x.numel() == 0:
        return [torch.zeros_like(like) for like, needed in zip(likes, needs) if needed]
    bands = Bands(x, position, patch_size, channels_are_batch)
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
    saved = [s1, s2] if save else []
    del s1, h1
    for part, here in bands:
        h3 = _activate_(product(s2[here] if relu else F.silu(s2[here]), w3.T), relu)
        bands.write(x, h3, w4.flatten(1).T, part, output, positioned=True)
    return saved


def _free_backward(gradient, x, bands, w1, w2, w3, w4, saved, activation, needs, inputs):
    """The gradients of w2, w3, w4; ``inputs`` gets those of W1's results."""
    taps = w2.new_zeros(9, *w2.shape[:2]) if needs[3] else None
    w4 = w4.flatten(1)
    of_w3 = torch.zeros_like(w3) if needs[4] else None
    of_w4 = torch.zeros_like(w4) if needs[5] else None
    block = _FreeBlock(gradient, bands, w2, w3, w4, *saved, activation == "relu")
    for slab in bands.slabs(1 if is_narrow(w2) else _SLABS):
        inputs.add(slab.begin, slab.end, block.backward(slab, taps, of_w3, of_w4))
    return _weight_of(taps), of_w3, of_w4


@dataclass(frozen=True)
class _FreeBlock:
    """The backward pass from the output to W1's results. What a slab takes in between is free again after it."""

    gradient: Tensor
    bands: Bands
    w2: Tensor
    w3: Tensor
    w4: Tensor
    s1: Tensor
    s2: Tensor
    relu: bool

    def backward(self, slab: Slab, taps: Tensor | None, of_w3: Tensor | None, of_w4: Tensor | None) -> Tensor:
        """The gradient of W1's results; adds to those of the weights."""
        of_s2 = self.s2.new_empty(slab.positions, self.s2.shape[1])
        for part, here in self.bands.parts(slab.begin, slab.end):
            slope = self.bands.features(self.gradient, part)
            self._to_second(slope, self.s2[here], of_s2[slab.inside(here)], of_w3, of_w4)
        for part, rows, here in slab.neighbours:
            slope = self.bands.features(self.gradient, part)[rows]
            self._to_second(slope, self.s2[here], of_s2[slab.inside(here)])
        of_s2 = of_s2.view(*slab.grid, -1)
        s1 = self.s1[slab.window]
        if taps is not None:
            h1 = s1 if self.relu else F.silu(s1)
            add_weight_gradient(taps, of_s2, h1.view(*slab.grid, -1), self.w2, slab.tile_rows)
        of_h1 = convolve_transposed(of_s2, self.w2, slab.tile_rows).flatten(0, 2)
        return _through_activation_(of_h1[slab.own], s1[slab.own], self.relu)

    def _to_second(self, slope: Tensor, s2: Tensor, of_s2: Tensor, of_w3=None, of_w4=None) -> None:
        """of_s2, given the output's gradient; adds to those of the weights."""
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
    return [t1, t2, u1] if save else []


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
