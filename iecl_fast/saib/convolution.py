"""The 3x3 convolution of the CPU's forward and backward pass, float32, features as (images, height, width, channels).

In the Winograd domain, F(2x2, 3x3) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", with torch's
products of matrices: 16 multiplications for 2x2 results instead of 36. The transforms are those of csrc/saib. torch's
own convolution runs at what the machine can multiply, and so takes longer, but for narrow features, where transforms
are not small beside the products. Its weight gradient is not used: its bits depend on the number of threads.

Rounding errors are 0.4 to 2 times those of torch's convolution where that runs AVX-512. Where it runs AVX2 and a grid
has only 2x2 patches, gradients err up to 4 times as much: the padding's zeros, most of the taps, cost torch no digits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from iecl_fast.saib.products import add_product, products

_kernels = torch.ops.iecl_fast

_NARROW = 20  # channels
_SCRATCH_BYTES = 3 << 18  # of tiles at once, or half as much as the weights they are multiplied with
_G = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0.0, 0.0, 1.0]])
_ROWS_OF_G = [torch.kron(row[None], _G) for row in _G]  # (4, 9): a row of the 4x4 domain from the nine taps
_TAPS_IN_USE = (slice(0, 3), slice(0, 9), slice(0, 9), slice(6, 9))  # others are multiplied with zeros


def is_narrow(weight: Tensor) -> bool:
    """Whether torch's own convolution takes less time."""
    return weight.shape[1] < _NARROW


def convolve(features: Tensor, weight: Tensor, relu: bool = False) -> Tensor:
    """(B, h, w, D) and (E, D, 3, 3) to (B, h, w, E), zero padding; with ``relu`` negative results are 0."""
    if is_narrow(weight):
        results = F.conv2d(features.permute(0, 3, 1, 2), weight, padding=1).permute(0, 2, 3, 1).contiguous()
        return results.relu_() if relu else results
    results = features.new_empty(*features.shape[:3], weight.shape[0])
    domain = _Domain(features, weight)
    for frequency in range(4):
        domain.transform(weight, _ROWS_OF_G[frequency])
        for begin, end, of_features, of_results in domain:
            _kernels._saib_tiles_of_features(features, frequency, begin, end, of_features)
            products(of_features, domain.weight.transpose(1, 2), out=of_results)
            _kernels._saib_add_to_results(of_results, frequency, begin, end, relu, results)
    return results


def convolve_transposed(gradients: Tensor, weight: Tensor, tile_rows: tuple[int, int] | None = None) -> Tensor:
    """The gradient of the features, given that of the results: a convolution with the taps in reverse.

    ``tile_rows`` (begin, end): only these pairs of rows are written, those of all images counted through; they need one
    row above and one below. Narrow features are done as a whole.
    """
    if is_narrow(weight):
        return F.conv_transpose2d(gradients.permute(0, 3, 1, 2), weight, padding=1).permute(0, 2, 3, 1).contiguous()
    of_features = gradients.new_empty(*gradients.shape[:3], weight.shape[1])
    domain = _Domain(gradients, weight, tile_rows)
    for frequency in range(4):
        domain.transform(weight, _ROWS_OF_G[frequency].flip(1))
        for begin, end, of_results, of_gradients in domain:
            _kernels._saib_tiles_of_features(gradients, frequency, begin, end, of_gradients)
            products(of_gradients, domain.weight, out=of_results)
            _kernels._saib_add_to_results(of_results, frequency, begin, end, False, of_features)
    return of_features


def add_weight_gradient(
    taps: Tensor, gradients: Tensor, features: Tensor, weight: Tensor, tile_rows: tuple[int, int] | None = None
) -> None:
    """Adds the gradient of the weight, given those of the results, to ``taps``: (9, E, D), contiguous.

    ``tile_rows`` as for ``convolve_transposed``: only the gradients of these pairs of rows count.
    """
    if is_narrow(weight):
        return _add_narrow_weight_gradient(taps, gradients, features)
    domain = _Domain(features, weight, tile_rows)
    for frequency in range(4):
        for begin, end, of_features, of_results in domain:
            _kernels._saib_tiles_of_features(features, frequency, begin, end, of_features)
            _kernels._saib_tiles_of_gradients(gradients, frequency, begin, end, of_results)
            # beta = 0 ignores what was there.
            pair = of_results.transpose(1, 2), of_features
            torch.baddbmm(domain.weight, *pair, beta=int(begin > domain.begin), out=domain.weight)
        used = _TAPS_IN_USE[frequency]
        taps.flatten(1)[used].addmm_(_ROWS_OF_G[frequency].T[used], domain.weight.flatten(1))


def _add_narrow_weight_gradient(taps, gradients, features):
    """Tap by tap."""
    _, height, width, _ = features.shape
    padded = F.pad(features, (0, 0, 1, 1, 1, 1))
    for i in range(3):
        for j in range(3):
            shifted = padded[:, i : i + height, j : j + width].flatten(0, 2)
            add_product(taps[3 * i + j], gradients.flatten(0, 2).T, shifted)


class _Domain:
    """Memory for a row of the 4x4 domain of weights and tiles, and the ranges of rows of tiles for which it lasts."""

    def __init__(self, features: Tensor, weight: Tensor, tile_rows: tuple[int, int] | None = None):
        images, height, width, _ = features.shape
        self.begin, self.end = tile_rows or (0, images * ((height + 1) // 2))
        self.columns = (width + 1) // 2
        rows = self.end - self.begin
        bytes_each = 4 * self.columns * (weight.shape[0] + weight.shape[1]) * features.element_size()
        self.weight = weight.new_empty(4, *weight.shape[:2])
        parts = max(1, -(-rows * bytes_each // max(_SCRATCH_BYTES, self.weight.nbytes // 2)))
        self.step = max(1, -(-rows // parts))
        size = 4 * self.step * self.columns
        self.memory = [features.new_empty(size * channels) for channels in (weight.shape[1], weight.shape[0])]

    def transform(self, weight: Tensor, rows_of_g: Tensor) -> None:
        """A row of G w G^T: (4, E, D)."""
        torch.mm(rows_of_g, weight.view(-1, 9).T, out=self.weight.flatten(1))

    def __iter__(self):
        """Each range, and its memory for (4, tiles, D) and (4, tiles, E)."""
        for begin in range(self.begin, self.end, self.step):
            end = min(begin + self.step, self.end)
            tiles = (end - begin) * self.columns
            channels = self.weight.shape[2], self.weight.shape[1]
            yield (
                begin,
                end,
                *(memory[: 4 * tiles * own].view(4, tiles, own) for memory, own in zip(self.memory, channels)),
            )
