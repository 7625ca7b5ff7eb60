"""SAIB by Triton kernels: the operators' forward and backward pass, as plain.py has them for every other device.

Saved for the backward pass, as rows (see triton_tiles.py): "free": what w1 and w2 give, after ReLU or before SiLU; what
w3 gives is computed again. "monotone": W1 P, W2 W1 P, M P (after ReLU or before SiLU) and W2^T W3^T act(M P).
"""

import torch
from torch import Tensor

from iecl_fast.saib import reference
from iecl_fast.saib import triton_plan as plan
from iecl_fast.saib.triton_launch import (
    Geometry,
    Rows,
    WeightGradient,
    geometry,
    is_straight,
    new_rows,
    on_device_of,
    pack,
    product,
    tail,
)


def empty_saved(x, w1, patch_size, channels_are_batch, activation, expansion) -> list[Tensor]:
    """Tensors of the shapes that ``forward`` saves."""
    shape = geometry(x, patch_size, channels_are_batch)
    return [new_rows(shape, x, width) for width in ((1, 2) if expansion == "free" else (1, 2, 2, 1))]


def forward(x, position, w1, w2, w3, w4, patch_size, channels_are_batch, activation, expansion, save):
    output = torch.empty_like(x)
    saved = empty_saved(x, w1, patch_size, channels_are_batch, activation, expansion) if save else []
    if x.numel() > 0:
        shape = geometry(x, patch_size, channels_are_batch)
        weights = [pack(weight, x.dtype) for weight in (w1, w2, w3, w4) if weight is not None]
        with on_device_of(x):
            run = _free_forward if expansion == "free" else _monotone_forward
            run(shape, x, _Embedding(position, shape, x), weights, activation, saved, output)
    return output, saved


def backward(
    gradient, x, position, w1, w2, w3, w4, saved, patch_size, channels_are_batch, activation, expansion, needs
):
    """Gradients of those of x, position, w1, w2, w3, w4 that ``needs`` names, in this order."""
    tensors = (x, position, w1, w2, w3, w4)
    if x.numel() == 0:
        return [torch.zeros_like(tensor) for tensor, needed in zip(tensors, needs) if needed]
    shape = geometry(x, patch_size, channels_are_batch)
    with on_device_of(x):
        run = _FreeBackward if expansion == "free" else _MonotoneBackward
        results = run(shape, gradient, tensors, saved, activation, needs).results()
    return [result for result, needed in zip(results, needs) if needed]


class _Embedding:
    """The positional embedding, where products want it. Of no cost: it has one number where X has a batch of them.

    channels_are_batch: W1 (P + E) = W1 P + rowsum(W1) E; otherwise E is another sample, and W1 E a bias.
    """

    def __init__(self, position: Tensor | None, shape: Geometry, x: Tensor):
        self.shape, self.grid = shape, None
        if position is None:
            return
        self.grid = position.contiguous()
        if not shape.channels_are_batch:
            channels = reference.to_channels(position[None], shape.patch_size, (1, *x.shape[1:]), False)
            self.grid = _padded_columns(channels.flatten(2)[0].T, plan.padded(shape.width))

    def through(self, w1: Tensor) -> dict:
        """What a product with W1 (packed) adds to W1 P."""
        if self.grid is None:
            return {}
        if self.shape.channels_are_batch:
            return {"position": self.grid, "columns": w1[0].sum(dim=1, dtype=torch.float32)}
        return {"position": self.grid.float() @ w1[0].float().T}


def _padded_columns(matrix: Tensor, width: int) -> Tensor:
    whole = matrix.new_zeros(len(matrix), width)
    whole[:, : matrix.shape[1]] = matrix
    return whole


def _stored(activation: str) -> str:
    """The activation of features before they are stored: SiLU's gradient needs what came before it."""
    return "relu" if activation == "relu" else "none"


def _loaded(activation: str) -> str:
    """The activation of stored features when they are read."""
    return "none" if activation == "relu" else activation


# ---- free: P + W4 act(W3 act(W2 * act(W1 P))) ------------------------------------------------------------------------


def _free_forward(shape, x, embedding, weights, activation, saved, output):
    w1, w2, w3, w4 = weights
    first, second = saved or (new_rows(shape, x, 1), None)
    stored, loaded = _stored(activation), _loaded(activation)
    product(shape, x, w1, Rows(first), stored, **embedding.through(w1))
    silu = activation == "silu"
    straight = is_straight(shape, x) and is_straight(shape, output)
    tile = plan.tail_tile(x.element_size(), shape.positions, shape.width, silu, straight, shape.hopper)
    if tile is not None:
        tail(shape, tile, first, [w2, w3, w4], second, x, output, embedding.grid, silu)
        return
    second = new_rows(shape, x, 2) if second is None else second
    third = new_rows(shape, x, 2)
    product(shape, Rows(first), w2, Rows(second), stored, load_activation=loaded)
    product(shape, Rows(second), w3, Rows(third), stored, load_activation=loaded)
    product(shape, Rows(third), w4, output, "skip", load_activation=loaded, skip=x, position=embedding.grid)


class _Backward:
    """What both expansions share: gradients of x and position once the gradient after W1 is there."""

    def __init__(self, shape, gradient, tensors, saved, activation, needs):
        self.shape, self.gradient, self.saved, self.activation = shape, gradient, saved, activation
        self.x, self.position, *weights = tensors
        self.need_x, self.need_position, *self.need_weights = needs
        self.weights = [pack(weight, self.x.dtype) for weight in weights if weight is not None]
        self.embedding = _Embedding(self.position, shape, self.x)
        self.loaded, self.slope = _loaded(activation), f"{activation}_gradient"
        self.dx = torch.empty_like(self.x)
        self.sums = None
        if self.need_position and shape.channels_are_batch:
            # A row for each tile of channels; no tile is narrower than 64. Wider ones leave rows at zero.
            self.sums = self.x.new_zeros(-(-shape.width // 64), shape.positions, dtype=torch.float32)
        self.over_samples = None
        self.raw_weights = weights

    def weight_gradients(self, units: int) -> list[WeightGradient | None]:
        """Sums for each weight that needs a gradient, which get at most ``units`` at a time."""
        return [
            WeightGradient(self.shape, weight, units * self.shape.unit, self.x.dtype, from_image) if needed else None
            for weight, needed, from_image in zip(self.raw_weights, self.need_weights, (True, False, False, True))
        ]

    def through_w1(self, d1: Rows, units: tuple[int, int], w1_sums: WeightGradient | None) -> None:
        """From the gradient after W1 for ``units``: dX, and what the gradients of position and W1 add up."""
        shape, batch = self.shape, self.shape.channels_are_batch
        if self.need_x or self.sums is not None:
            product(
                shape, d1, self.weights[0], self.dx, "skip",
                transposed=True, skip=self.gradient, sums=self.sums, units=units,
            )  # fmt: skip
        if w1_sums is not None:
            w1_sums.add(d1, self.x, units, position=self.embedding.grid if batch else None)
        if self.position is not None and not batch and (self.need_position or w1_sums is not None):
            own = d1.values[: (units[1] - units[0]) * shape.unit].view(-1, shape.cells, d1.values.shape[1])
            over_samples = own.sum(dim=0, dtype=torch.float32)
            self.over_samples = over_samples if self.over_samples is None else self.over_samples + over_samples

    def position_gradient(self) -> Tensor | None:
        if not self.need_position:
            return None
        shape = self.shape
        if shape.channels_are_batch:
            return self.sums.sum(dim=0).view(self.position.shape).to(self.position.dtype)
        branch = (self.over_samples @ self.weights[0][0].float())[:, : shape.width]
        image_shape = self.x.shape[1:]
        branch = branch.T.reshape(1, shape.width, shape.extent_a, shape.extent_b)
        branch = reference.from_channels(branch, shape.patch_size, (1, *image_shape), False)[0]
        direct = self.gradient.sum(dim=0, keepdim=True, dtype=torch.float32)
        return (reference.patchify(direct, shape.patch_size)[0] + branch).to(self.position.dtype)

    def add_embedding(self, w1_sums: WeightGradient | None) -> None:
        """The embedding's part of W1's gradient, where it is another sample."""
        if w1_sums is not None and self.over_samples is not None:
            w1_sums.add_last(self.over_samples.T @ self.embedding.grid.float())


class _FreeBackward(_Backward):
    """In pieces of the positions, so that only a part of the gradients between the products exists at a time.

    Up to the gradient after W2, d2, a piece needs nothing but itself. The 3x3 looks one row further at both ends: it
    lags by one unit behind and finds the last two units of d2 kept.
    """

    def results(self) -> list[Tensor | None]:
        shape = self.shape
        margin = 1 if shape.channels_are_batch else 0
        at_once = plan.units_at_once(shape.units, shape.unit, shape.width, self.x.element_size())
        self.sums_of = self.weight_gradients(at_once)
        third, d3 = (new_rows(shape, self.x, 2, at_once) for _ in range(2))
        d2 = new_rows(shape, self.x, 2, min(shape.units, at_once + 2 * margin))
        d1 = new_rows(shape, self.x, 1, min(shape.units, at_once + margin))
        start = ready = done = 0
        while done < shape.units:
            end = min(ready + at_once, shape.units)
            self._to_d2((ready, end), third, d3, Rows(d2, start * shape.unit))
            last = end if end == shape.units else end - margin
            self._from_d2((done, last), Rows(d2, start * shape.unit), d1)
            ready, done = end, last
            if done < shape.units:
                kept = d2[(done - margin - start) * shape.unit : (ready - start) * shape.unit]
                d2[: len(kept)] = kept
                start = done - margin
        self.add_embedding(self.sums_of[0])
        weights = [sums.result() if sums is not None else None for sums in self.sums_of]
        return [self.dx, self.position_gradient(), *weights]

    def _to_d2(self, units, third, d3, d2):
        shape, loaded = self.shape, self.loaded
        _, _, w3, w4 = self.weights
        _, _, w3_sums, w4_sums = self.sums_of
        second = Rows(self.saved[1])
        third, d3 = Rows(third, units[0] * shape.unit), Rows(d3, units[0] * shape.unit)
        product(shape, second, w3, third, _stored(self.activation), load_activation=loaded, units=units)
        product(shape, self.gradient, w4, d3, self.slope, transposed=True, saved=third, units=units)
        if w4_sums is not None:
            w4_sums.add(self.gradient, third, units, load_activation=loaded)
        product(shape, d3, w3, d2, self.slope, transposed=True, saved=second, units=units)
        if w3_sums is not None:
            w3_sums.add(d3, second, units, load_activation=loaded)

    def _from_d2(self, units, d2, d1):
        first, d1 = Rows(self.saved[0]), Rows(d1, units[0] * self.shape.unit)
        w1_sums, w2_sums, *_ = self.sums_of
        if w2_sums is not None:
            w2_sums.add(d2, first, units, load_activation=self.loaded)
        product(self.shape, d2, self.weights[1], d1, self.slope, transposed=True, saved=first, units=units)
        self.through_w1(d1, units, w1_sums)


# ---- monotone: P + M^T act(M P), M = W3 W2 W1 ------------------------------------------------------------------------


def _monotone_forward(shape, x, embedding, weights, activation, saved, output):
    w1, w2, w3 = weights
    first, second, z, back = (Rows(one) for one in saved or [new_rows(shape, x, width) for width in (1, 2, 2, 1)])
    product(shape, x, w1, first, "none", **embedding.through(w1))
    product(shape, first, w2, second, "none")
    product(shape, second, w3, z, _stored(activation))
    between = Rows(new_rows(shape, x, 2)) if saved else second
    product(shape, z, w3, between, "none", transposed=True, load_activation=_loaded(activation))
    product(shape, between, w2, back, "none", transposed=True)
    product(shape, back, w1, output, "skip", transposed=True, skip=x, position=embedding.grid)


class _MonotoneBackward(_Backward):
    """M is used forwards, on P, and backwards, on act(M P); the gradient of the latter runs forwards through M."""

    def results(self) -> list[Tensor | None]:
        shape = self.shape
        w1, w2, w3 = self.weights
        units = 0, shape.units
        first, second, z, back = (Rows(one) for one in self.saved)
        w1_sums, w2_sums, w3_sums, _ = self.weight_gradients(shape.units)
        one, other, dz = (Rows(new_rows(shape, self.x, width)) for width in (1, 2, 2))
        product(shape, self.gradient, w1, one, "none")
        product(shape, one, w2, other, "none")
        product(shape, other, w3, dz, self.slope, saved=z)
        if w3_sums is not None:
            w3_sums.add(z, other, units, gradient_activation=self.loaded)
        product(shape, z, w3, other, "none", transposed=True, load_activation=self.loaded)
        if w2_sums is not None:
            w2_sums.add(other, one, units)
        if w1_sums is not None:
            w1_sums.add(back, self.gradient, units)
        product(shape, dz, w3, other, "none", transposed=True)
        if w3_sums is not None:
            w3_sums.add(dz, second, units)
        if w2_sums is not None:
            w2_sums.add(other, first, units)
        product(shape, other, w2, one, "none", transposed=True)
        self.through_w1(one, units, w1_sums)
        self.add_embedding(w1_sums)
        sums = (w1_sums, w2_sums, w3_sums)
        weights = [own.result() if own is not None else None for own in sums]
        return [self.dx, self.position_gradient(), *weights, None]
