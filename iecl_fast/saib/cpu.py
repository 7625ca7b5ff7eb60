"""Forward and backward pass on the CPU, float32.

All products of matrices and narrow 3x3 convolutions are torch's own. Features lie as (positions, channels), so that the
1x1 convolutions are plain products. Whatever is between images and features is done band by band (rows of patches),
beside the products and while it lies in a cache: no pass over memory of its own lays anything out.

"free" saves h1 and h2 ("silu": what they are activations of), 3 D floats a position. h3 is computed again, band by
band, for 4 D^2 of the forward pass' 25 D^2 multiplications a position, and never exists as a whole. "monotone" saves
W1 P, W2 W1 P and W2^T W3^T act(M P), 4 D floats a position.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from iecl_fast.saib import reference
from iecl_fast.saib.convolution import convolve, convolve_transposed, weight_gradient
from iecl_fast.saib.products import add_product, product

_kernels = torch.ops.iecl_fast
_BAND_BYTES = 1 << 19  # of the widest features at once: a quarter of a second-level cache


class _Bands:
    """Parts of the images, each some rows of patches, and the positions of the features that belong to them."""

    def __init__(self, x: Tensor, position: Tensor | None, patch_size: int, channels_are_batch: bool):
        self.position, self.options = position, (patch_size, channels_are_batch)
        self.image_shape, self.channels_are_batch = x.shape, channels_are_batch
        self.grid = feature_grid(x, patch_size, channels_are_batch)
        n, channels, height, _ = x.shape
        count = (channels if channels_are_batch else n) * (height // patch_size)
        self.positions = self.grid[0] * self.grid[1] * self.grid[2]
        self.positions_each = self.positions // max(count, 1)
        step = max(1, _BAND_BYTES // max(1, self.positions_each * 2 * self.grid[3] * x.element_size()))
        self.parts = [(begin, min(begin + step, count)) for begin in range(0, count, step)]

    def __iter__(self):
        """Each part and its slice of the positions."""
        for begin, end in self.parts:
            yield (begin, end), slice(begin * self.positions_each, end * self.positions_each)

    def features(self, image: Tensor, part: tuple[int, int], positioned: bool = False) -> Tensor:
        """patchify(image) [+ position] of a part: (positions, channels)."""
        features = _kernels._saib_gather(image, self.position if positioned else None, *self.options, *part)
        return features.T if self.channels_are_batch else features

    def write(self, image, features, weight, part, result, positioned: bool = False) -> None:
        """result = 2 image + unpatchify(features @ weight [+ position]) of a part."""
        # The product comes in the order of the image's memory.
        branch = product(weight.T, features.T) if self.channels_are_batch else product(features, weight)
        _kernels._saib_scatter(image, self.position if positioned else None, branch, *self.options, *part, result)

    def position_gradient(self, gradient: Tensor, of_features: Tensor, weight: Tensor) -> Tensor:
        """Sum over the images of gradient + unpatchify(of_features @ weight): (R, p*p)."""
        patch_size, channels_are_batch = self.options
        if gradient.stride(0) < gradient[0].numel():
            gradient = gradient.contiguous()  # the order of the sum is that of the layout
        own = reference.patchify(gradient.sum(0, keepdim=True), patch_size)[0]
        if channels_are_batch:
            return own + torch.mv(of_features, weight.sum(1)).view(own.shape)
        features = product(of_features.view(self.grid[0], -1, self.grid[3]).sum(0), weight)
        features = features.T.reshape(1, self.grid[3], *self.grid[1:3])
        return own + reference.from_channels(features, patch_size, self.image_shape, False)[0]


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
    of_h1, of_w1, *of_weights = run(gradient, x, bands, *weights, saved, activation, needs)
    of_x = torch.empty_like(x) if needs[0] else None
    for part, here in bands:
        if needs[2]:
            add_product(of_w1, of_h1[here].T, bands.features(x, part, positioned=True))
        if needs[0]:
            bands.write(gradient, of_h1[here], w1.flatten(1), part, of_x)
    of_position = bands.position_gradient(gradient, of_h1, w1.flatten(1)) if needs[1] else None
    gradients = [of_x, of_position, of_w1, *of_weights]
    return [_laid_out_as(own, like) for own, like, needed in zip(gradients, likes, needs) if needed]


# ---- free ----------------------------------------------------------------------------------------------------------


def _free_forward(x, bands, w1, w2, w3, w4, activation, save, output):
    relu = activation == "relu"
    s1 = x.new_empty(bands.positions, len(w1))
    for part, here in bands:
        product(bands.features(x, part, positioned=True), w1.T, out=s1[here])
        if relu:
            s1[here].relu_()
    h1 = s1 if relu else F.silu(s1, inplace=not save)
    s2 = convolve(h1.view(bands.grid), w2, relu).flatten(0, 2)
    del h1
    for part, here in bands:
        h3 = product(s2[here] if relu else F.silu(s2[here]), w3.T)
        h3 = h3.relu_() if relu else F.silu(h3, inplace=True)
        bands.write(x, h3, w4.flatten(1).T, part, output, positioned=True)
    return [s1, s2]


def _free_backward(gradient, x, bands, w1, w2, w3, w4, saved, activation, needs):
    s1, s2 = saved
    relu = activation == "relu"
    w4 = w4.flatten(1)
    of_w3, of_w4 = torch.zeros_like(w3), torch.zeros_like(w4)
    of_s2 = torch.empty_like(s2)
    for part, here in bands:
        h2 = s2[here] if relu else F.silu(s2[here])
        s3 = product(h2, w3.T)
        h3 = s3.relu_() if relu else F.silu(s3)
        slope = bands.features(gradient, part)
        if needs[5]:
            add_product(of_w4, slope.T, h3)
        of_s3 = _through_activation_(product(slope, w4), s3, relu)
        if needs[4]:
            add_product(of_w3, of_s3.T, h2)
        _through_activation_(product(of_s3, w3, out=of_s2[here]), s2[here], relu)
    h1 = s1 if relu else F.silu(s1)
    of_s2 = of_s2.view(*bands.grid[:3], -1)
    of_w2 = weight_gradient(of_s2, h1.view(bands.grid), w2) if needs[3] else None
    of_s1 = convolve_transposed(of_s2, w2)
    of_s1 = _through_activation_(of_s1.flatten(0, 2), s1, relu)
    return of_s1, torch.zeros_like(w1), of_w2, of_w3, of_w4


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


def _monotone_backward(gradient, x, bands, w1, w2, w3, w4, saved, activation, needs):
    """M is used forwards, on P, and backwards, on act(M P). The gradient of the latter runs forwards through M."""
    t1, t2, u1 = saved
    of_w1, of_w3 = torch.zeros_like(w1), torch.zeros_like(w3)
    v1 = torch.empty_like(t1)
    for part, here in bands:
        slope = bands.features(gradient, part)
        product(slope, w1.T, out=v1[here])
        add_product(of_w1, u1[here].T, slope)
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
    of_w2 = None
    if needs[3]:
        of_w2 = weight_gradient(u2, v1, w2).add_(weight_gradient(v2, t1.view(bands.grid), w2))
    del u2, flat_u2, v1
    return convolve_transposed(v2, w2).flatten(0, 2), of_w1, of_w2, of_w3, None


def _laid_out_as(tensor: Tensor, like: Tensor) -> Tensor:
    tensor = tensor.view(like.shape)
    result = torch.empty_like(like)
    return tensor if tensor.stride() == result.stride() else result.copy_(tensor)
