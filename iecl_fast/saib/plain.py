"""Forward and backward pass in plain PyTorch, for devices and dtypes without kernels.

``saved`` is a list whose length and layouts are each implementation's own. Here, "free": the sums before the three
activations; "monotone": W1 P, W2 W1 P, M P and W2^T W3^T act(M P).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from iecl_fast.saib import reference


def forward(x, position, w1, w2, w3, w4, patch_size, channels_are_batch, activation, expansion, save):
    act = reference.ACTIVATIONS[activation]
    p = _patches(x, position, patch_size, channels_are_batch)
    if expansion == "free":
        z1 = F.conv2d(p, w1)
        z2 = F.conv2d(act(z1), w2, padding=1)
        z3 = F.conv2d(act(z2), w3)
        branch, saved = F.conv2d(act(z3), w4), [z1, z2, z3]
    else:
        t1 = F.conv2d(p, w1)
        t2 = F.conv2d(t1, w2, padding=1)
        z = F.conv2d(t2, w3)
        u1 = F.conv_transpose2d(F.conv_transpose2d(act(z), w3), w2, padding=1)
        branch, saved = F.conv_transpose2d(u1, w1), [t1, t2, z, u1]
    patches = reference.from_channels(p + branch, patch_size, x.shape, channels_are_batch)
    output = x + reference.unpatchify(patches, patch_size, *x.shape[1:])
    return laid_out_as(output, x), [tensor.contiguous() for tensor in saved] if save else []


def empty_saved(x, w1, patch_size, channels_are_batch, activation, expansion) -> list[Tensor]:
    """Tensors of the shapes that ``forward`` saves."""
    n, channels, height, width = x.shape
    rows, columns = height // patch_size, width // patch_size
    if channels_are_batch:
        n, rows, columns = 1, channels * rows * columns, patch_size**2
    width_1, width_2 = w1.shape[0], 2 * w1.shape[0]
    widths = (width_1, width_2, width_2) if expansion == "free" else (width_1, width_2, width_2, width_1)
    return [x.new_empty(n, width, rows, columns) for width in widths]


def backward(
    gradient, x, position, w1, w2, w3, w4, saved, patch_size, channels_are_batch, activation, expansion, needs
):
    """Gradients of those of x, position, w1, w2, w3, w4 that ``needs`` names, in this order."""
    weights = (w1, w2, w3, w4)
    gradient = gradient.contiguous()  # the order of sums is that of the layout
    p = _patches(x, position, patch_size, channels_are_batch)
    g = reference.to_channels(
        reference.patchify(gradient, patch_size), patch_size, x.shape, channels_are_batch
    ).contiguous()
    if expansion == "free":
        branch_gradient, weight_gradients = _free_backward(g, p, *weights, *saved, activation)
    else:
        branch_gradient, weight_gradients = _monotone_backward(g, p, *weights[:3], *saved, activation)
    slope = reference.from_channels(branch_gradient, patch_size, x.shape, channels_are_batch)
    results = [
        # X enters three times: as itself, in the skip of P, and in the branch.
        lambda: laid_out_as(2 * gradient + reference.unpatchify(slope, patch_size, *x.shape[1:]), x),
        lambda: (reference.patchify(gradient, patch_size) + slope).sum(0),
        *(lambda i=i: laid_out_as(weight_gradients[i], weights[i]) for i in range(4)),
    ]
    return [result() for result, needed in zip(results, needs) if needed]


def _free_backward(g, p, w1, w2, w3, w4, z1, z2, z3, activation):
    act = reference.ACTIVATIONS[activation]
    d3, dw4 = _convolution_backward(g, act(z3), w4)
    d2, dw3 = _convolution_backward(_before_activation(d3, z3, activation), act(z2), w3)
    d1, dw2 = _convolution_backward(_before_activation(d2, z2, activation), act(z1), w2)
    dp, dw1 = _convolution_backward(_before_activation(d1, z1, activation), p, w1)
    return dp, [dw1, dw2, dw3, dw4]


def _monotone_backward(g, p, w1, w2, w3, t1, t2, z, u1, activation):
    """M is used forwards, on P, and backwards, on act(M P); the gradient of the latter runs forwards through M."""
    act = reference.ACTIVATIONS[activation]
    a = act(z)
    u2 = F.conv_transpose2d(a, w3)
    v1 = F.conv2d(g, w1)
    v2 = F.conv2d(v1, w2, padding=1)
    dz = _before_activation(F.conv2d(v2, w3), z, activation)
    d2, dw3 = _convolution_backward(dz, t2, w3)
    d1, dw2 = _convolution_backward(d2, t1, w2)
    dp, dw1 = _convolution_backward(d1, p, w1)
    _, of_w3 = _convolution_backward(a, v2, w3)
    _, of_w2 = _convolution_backward(u2, v1, w2)
    _, of_w1 = _convolution_backward(u1, g, w1)
    return dp, [dw1 + of_w1, dw2 + of_w2, dw3 + of_w3]


def _patches(x, position, patch_size, channels_are_batch):
    patches = reference.patchify(x.contiguous(), patch_size)
    if position is not None:
        patches = patches + position
    return reference.to_channels(patches, patch_size, x.shape, channels_are_batch).contiguous()


def _convolution_backward(gradient, features, weight) -> tuple[Tensor, Tensor]:
    """Gradients of the convolution's input and weight."""
    padding = [weight.shape[2] // 2] * 2
    return torch.ops.aten.convolution_backward(
        gradient, features, weight, None, [1, 1], padding, [1, 1], False, [0, 0], 1, [True, True, False]
    )[:2]


def _before_activation(gradient, z, activation):
    if activation == "relu":
        return torch.ops.aten.threshold_backward(gradient, z, 0)
    return torch.ops.aten.silu_backward(gradient, z)


def laid_out_as(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor in the memory layout of another, itself if it has that."""
    result = torch.empty_like(like)
    return tensor if tensor.stride() == result.stride() else result.copy_(tensor)
