"""The 3x3 convolution of the CPU's forward and backward pass, float32, features as (images, height, width, channels).

In the Winograd domain, F(2x2, 3x3) of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", with torch's
products of matrices: 16 multiplications for 2x2 results instead of 36. The transforms are those of csrc/saib. torch's
own convolution runs at what the machine can multiply, and so takes longer from about 20 channels on; the bits of its
weight gradient depend on the number of threads.
"""

import torch
from torch import Tensor

_kernels = torch.ops.iecl_fast

_SCRATCH_BYTES = 3 << 19  # of the Winograd domain at once: within a second-level cache
_G = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0.0, 0.0, 1.0]])
_ROWS_OF_G = [torch.kron(row[None], _G) for row in _G]  # (4, 9): a row of the 4x4 domain from the nine taps


def convolve(features: Tensor, weight: Tensor, relu: bool = False) -> Tensor:
    """(B, h, w, D) and (E, D, 3, 3) to (B, h, w, E), zero padding; with ``relu`` negative results are 0."""
    results = features.new_empty(*features.shape[:3], weight.shape[0])
    scratch = _Scratch(results, weight)
    for frequency in range(4):
        scratch.transform(weight, frequency)
        for begin, end, of_features, of_results in scratch:
            _kernels._saib_tiles_of_features(features, frequency, begin, end, of_features)
            torch.bmm(of_features, scratch.weight.transpose(1, 2), out=of_results)
            _kernels._saib_add_to_results(of_results, frequency, begin, end, relu, results)
    return results


def convolve_backward(
    gradients: Tensor, features: Tensor | None, weight: Tensor, needs_features: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the features, if ``needs_features``, and of the weight, if the features are given."""
    of_features = gradients.new_zeros(*gradients.shape[:3], weight.shape[1]) if needs_features else None
    needs_weight = features is not None
    of_taps = weight.new_empty(weight.shape[0] * weight.shape[1], 9) if needs_weight else None
    scratch = _Scratch(gradients, weight)
    of_weight = torch.empty_like(scratch.weight) if needs_weight else None
    for frequency in range(4):
        scratch.transform(weight, frequency)
        for begin, end, tiles, of_results in scratch:
            _kernels._saib_tiles_of_gradients(gradients, frequency, begin, end, of_results)
            if needs_weight:
                _kernels._saib_tiles_of_features(features, frequency, begin, end, tiles)
                # beta = 0 ignores what was there
                torch.baddbmm(of_weight, of_results.transpose(1, 2), tiles, beta=int(begin > 0), out=of_weight)
            if needs_features:
                torch.bmm(of_results, scratch.weight, out=tiles)
                _kernels._saib_add_to_gradients(tiles, frequency, begin, end, of_features)
        if needs_weight:
            rows = of_weight.flatten(1).T
            torch.addmm(of_taps, rows, _ROWS_OF_G[frequency], beta=int(frequency > 0), out=of_taps)
    return of_features, of_taps.view(weight.shape) if needs_weight else None


class _Scratch:
    """Memory of one row of the Winograd domain, and the ranges of rows of tiles for which it lasts."""

    def __init__(self, results: Tensor, weight: Tensor):
        images, height, width, _ = results.shape
        self.rows, self.columns = images * ((height + 1) // 2), (width + 1) // 2
        bytes_each = 4 * self.columns * (weight.shape[0] + weight.shape[1]) * results.element_size()
        parts = max(1, -(-self.rows * bytes_each // _SCRATCH_BYTES))
        self.step = max(1, -(-self.rows // parts))
        self.weight = weight.new_empty(4, *weight.shape[:2])
        size = 4 * self.step * self.columns
        self.memory = [results.new_empty(size * channels) for channels in (weight.shape[1], weight.shape[0])]

    def transform(self, weight: Tensor, frequency: int) -> None:
        """A row of G w G^T: (4, E, D)."""
        torch.mm(_ROWS_OF_G[frequency], weight.view(-1, 9).T, out=self.weight.flatten(1))

    def __iter__(self):
        """Each range, and its memory for (4, tiles, D) and (4, tiles, E)."""
        for begin in range(0, self.rows, self.step):
            end = min(begin + self.step, self.rows)
            tiles = (end - begin) * self.columns
            channels = self.weight.shape[2], self.weight.shape[1]
            yield (
                begin,
                end,
                *(memory[: 4 * tiles * own].view(4, tiles, own) for memory, own in zip(self.memory, channels)),
            )
