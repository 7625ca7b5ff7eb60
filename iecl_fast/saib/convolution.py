"""The 3x3 convolution of the CPU's forward and backward pass, float32, features as (images, height, width, channels).

Narrow ones are torch's own. Wide ones run in the Winograd domain, F(2x2, 3x3) of Lavin and Gray, "Fast Algorithms for
Convolutional Neural Networks", with torch's products of matrices: 16 multiplications for 2x2 results instead of 36, for
the price of transforms that have to be small beside the products.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_kernels = torch.ops.iecl_fast

WINOGRAD_CHANNELS = 96  # from here on it is faster, measured on a Sapphire Rapids
_SCRATCH_BYTES = 3 << 20  # of the Winograd domain at once: about a second-level cache, and little beside the features
_G = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0.0, 0.0, 1.0]])
_ROWS_OF_G = [torch.kron(row[None], _G) for row in _G]  # (4, 9): a row of the 4x4 domain from the nine taps


def convolve(features: Tensor, weight: Tensor, relu: bool = False) -> Tensor:
    """(B, h, w, D) and (E, D, 3, 3) to (B, h, w, E), zero padding; with ``relu`` negative results are 0."""
    if weight.shape[1] < WINOGRAD_CHANNELS:
        results = F.conv2d(features.permute(0, 3, 1, 2), weight, padding=1).permute(0, 2, 3, 1).contiguous()
        return results.relu_() if relu else results
    results = features.new_empty(*features.shape[:3], weight.shape[0])
    for frequency in range(4):
        transformed = _transformed(weight, frequency)
        for begin, end in _tile_rows(results, weight):
            tiles = _kernels._saib_tiles_of_features(features, frequency, begin, end)
            products = torch.bmm(tiles, transformed.transpose(1, 2))
            _kernels._saib_add_to_results(products, frequency, begin, end, relu, results)
    return results


def convolve_backward(
    gradients: Tensor, features: Tensor | None, weight: Tensor, needs_features: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the features, if ``needs_features``, and of the weight, if the features are given."""
    if weight.shape[1] < WINOGRAD_CHANNELS:
        return _direct_backward(gradients, features, weight, needs_features)
    of_features = gradients.new_zeros(*gradients.shape[:3], weight.shape[1]) if needs_features else None
    of_taps = None if features is None else weight.new_zeros(weight.shape[0] * weight.shape[1], 9)
    for frequency in range(4):
        transformed = _transformed(weight, frequency)
        of_transformed = None if features is None else torch.zeros_like(transformed)
        for begin, end in _tile_rows(gradients, weight):
            products = _kernels._saib_tiles_of_gradients(gradients, frequency, begin, end)
            if features is not None:
                tiles = _kernels._saib_tiles_of_features(features, frequency, begin, end)
                of_transformed.baddbmm_(products.transpose(1, 2), tiles)
            if needs_features:
                tiles = torch.bmm(products, transformed)
                _kernels._saib_add_to_gradients(tiles, frequency, begin, end, of_features)
        if features is not None:
            of_taps.addmm_(of_transformed.flatten(1).T, _ROWS_OF_G[frequency])
    return of_features, None if features is None else of_taps.view(weight.shape)


def _direct_backward(gradients, features, weight, needs_features):
    shape = (*gradients.shape[:3], weight.shape[1])
    like_features = gradients.new_empty(1).expand(shape) if features is None else features
    of_features, of_weight, _ = torch.ops.aten.convolution_backward(
        gradients.permute(0, 3, 1, 2),
        like_features.permute(0, 3, 1, 2),
        weight,
        None,
        [1, 1],
        [1, 1],
        [1, 1],
        False,
        [0, 0],
        1,
        [needs_features, features is not None, False],
    )
    return of_features.permute(0, 2, 3, 1).contiguous() if needs_features else None, of_weight


def _transformed(weight: Tensor, frequency: int) -> Tensor:
    """A row of G w G^T: (4, E, D)."""
    return torch.mm(_ROWS_OF_G[frequency], weight.reshape(-1, 9).T).view(4, *weight.shape[:2])


def _tile_rows(results: Tensor, weight: Tensor) -> list[tuple[int, int]]:
    """Ranges of rows of tiles, as many as the scratch memory takes."""
    images, height, width, _ = results.shape
    count = images * ((height + 1) // 2)
    bytes_each = 4 * ((width + 1) // 2) * (weight.shape[0] + weight.shape[1]) * results.element_size()
    parts = -(-count * bytes_each // _SCRATCH_BYTES)
    step = max(1, -(-count // max(parts, 1)))
    return [(begin, min(begin + step, count)) for begin in range(0, count, step)]
