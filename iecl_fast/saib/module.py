"""The entropy-generating block of IE-CL as a module."""

import torch
from torch import Tensor, nn

from iecl_fast.saib import reference
from iecl_fast.saib.functional import check_divisible, check_image, check_options, check_positive, saib
from iecl_fast.saib.jacobian import LogAbsDetJacobian, log_abs_det_jacobian

IMAGE_CHANNELS = 3


class SAIB(nn.Module):
    """A learnable block that expands the entropy of a batch of images, patch by patch, and keeps their shape.

    Zhang et al., "Maximizing Incremental Information Entropy for Contrastive Learning", section on SAIB. The images X
    (N, 3, H, W) become patches (N, R, p*p), R = 3 * (H/p) * (W/p), a row for each channel of each patch, and with a
    learned embedding E (R, p*p) added to them P = patchify(X) + E. On a channel axis of width D, without biases:

        h1 = act(W1 P)      1x1, D -> D
        h2 = act(W2 * h1)   3x3, D -> 2D, zero padding
        h3 = act(W3 h2)     1x1, 2D -> 2D
        P' = P + W4 h3      1x1, 2D -> D
        X' = X + unpatchify(P')

    Forward and backward pass are one operator each. Where the paper leaves a choice, this was chosen:

    * The channel axis. ``channels="batch"`` is the paper's: the mini-batch is the channel axis, D = N, and what is
      convolved is one image of R x p*p, so that the 3x3 mixes neighbouring patches and neighbouring pixels of a patch,
      and all images of the batch mix with each other. The batch size is then part of the weights: another one raises.
      ``channels="patch"``: D = 3*p*p over the (H/p) x (W/p) grid of patches; each image by itself, any batch size.
    * Rows are ordered by channel, then by the patch's place in the image, row by row, so that a row's neighbours are
      neighbouring patches of the same channel. Pixels of a patch, and the channels (channel, row, column) of "patch",
      are in nn.Unfold's order.
    * The embedding is part of P, so it also passes through the skip: X' = 2 X + unpatchify(E + W4 h3).
    * Weights start Kaiming-normal (fan-in), with the gain of ReLU, the embedding normal with a standard deviation of
      0.02, or there is none (``positional=False``).

    What the block does to the entropy is log|det J| of its Jacobian J, which ``log_abs_det_jacobian`` measures. The
    paper's proof that it is not negative does not hold for arbitrary weights: it may be of either sign, and only
    training towards entropy raises it. The last skip makes X' = 2 X + ... and adds log 2 to each dimension, which is
    mere scale and which the first batch normalisation of an encoder removes.

    ``expansion="monotone"`` is not negative by construction, with that log 2 taken off, for all weights. It replaces
    the branch by

        P' = P + M^T act(M P),   M = W3 W2 W1

    with the same three weights, no activations between them, M^T their transposes, and no W4. Proof: let S be the
    diagonal matrix of the slopes of act at M P. Those of ReLU are 0 or 1 (at 0, where it has none, anything between
    serves), so S >= 0 and M^T S M is symmetric with v^T M^T S M v = |S^(1/2) M v|^2 >= 0 for every v. The Jacobian of
    X' is, up to the order of the pixels, 2 I + M^T S M: symmetric, with no eigenvalue below 2, hence
    log|det J| >= d log 2 for d dimensions. For blocks in a row the logarithms add up. SiLU has slopes below 0 and is
    refused. Weights start with gain 1, as no activation follows them.

    Args:
        channels: "batch" or "patch".
        batch_size: N, with ``channels="batch"``; "patch" takes any and does not look at it.
        patch_size: p.
        image_size: H = W, or (H, W); p divides both.
        activation: "relu" or "silu".
        expansion: "free" or "monotone".
        cascade: how many blocks follow each other, each with weights of its own. Those of the first are ``position``,
            ``w1`` ... ``w4``, those of the others ``further.0.position``, ...
        positional: whether there is an embedding.

    Input and output: (N, 3, H, W), float32, float16, bfloat16 or float64, the weights' dtype (or under autocast); the
    output has the input's memory format.

    Raises:
        ValueError, TypeError: naming what was built, what came and what is allowed.
    """

    def __init__(
        self,
        channels: str = "batch",
        batch_size: int | None = None,
        patch_size: int = 4,
        image_size: int | tuple[int, int] = 32,
        activation: str = "relu",
        expansion: str = "free",
        cascade: int = 1,
        positional: bool = True,
    ):
        super().__init__()
        check_options(channels, activation, expansion)
        for name, value in (("patch_size", patch_size), ("cascade", cascade)):
            check_positive(name, value)
        sides = tuple(image_size) if isinstance(image_size, (tuple, list)) else (image_size, image_size)
        for value in sides:
            check_positive("image_size", value)
        if len(sides) != 2:
            raise ValueError(f"image_size = {image_size} is not allowed: a number or (height, width)")
        height, width = sides
        check_divisible("image_size", height, width, patch_size)
        if channels == "batch":
            if batch_size is None:
                raise ValueError('batch_size is missing: channels = "batch" makes the batch the channel axis')
            check_positive("batch_size", batch_size)
        self.channels, self.batch_size, self.patch_size = channels, batch_size, patch_size
        self.image_size = (height, width)
        self.activation, self.expansion = activation, expansion

        area = patch_size**2
        wide = batch_size if channels == "batch" else IMAGE_CHANNELS * area
        rows = IMAGE_CHANNELS * (height // patch_size) * (width // patch_size)
        self.position = nn.Parameter(torch.empty(rows, area)) if positional else None
        self.w1 = nn.Parameter(torch.empty(wide, wide, 1, 1))
        self.w2 = nn.Parameter(torch.empty(2 * wide, wide, 3, 3))
        self.w3 = nn.Parameter(torch.empty(2 * wide, 2 * wide, 1, 1))
        self.w4 = nn.Parameter(torch.empty(wide, 2 * wide, 1, 1)) if expansion == "free" else None
        self.further = nn.ModuleList(
            SAIB(channels, batch_size, patch_size, image_size, activation, expansion, 1, positional)
            for _ in range(cascade - 1)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of this block, not those of the blocks that follow it."""
        gain_of = "relu" if self.expansion == "free" else "linear"
        for weight in (self.w1, self.w2, self.w3, self.w4):
            if weight is not None:
                nn.init.kaiming_normal_(weight, nonlinearity=gain_of)
        if self.position is not None:
            nn.init.normal_(self.position, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        for block in (self, *self.further):
            x = saib(
                x,
                *block._weights(),
                patch_size=self.patch_size,
                channels=self.channels,
                activation=self.activation,
                expansion=self.expansion,
            )
        return x

    @torch.no_grad()
    def log_abs_det_jacobian(
        self,
        x: Tensor,
        *,
        exact: bool | None = None,
        num_probes: int = 16,
        num_steps: int = 64,
        generator: torch.Generator | None = None,
    ) -> LogAbsDetJacobian:
        """log|det J| of the map X -> X' at x, in nats per dimension: how much entropy the block adds there.

        With ``channels="batch"`` one figure for the batch, whose images depend on each other; with "patch" one for each
        image. Computed in float64 by plain PyTorch, on x's device.

        Args:
            x: as for the forward pass.
            exact: whether to form the Jacobian, at the price of a backward pass for each dimension and of its square
                in memory. Else stochastic Lanczos quadrature on J^T J. None: form it up to 2048 dimensions.
            num_probes: random vectors of the quadrature; the standard error falls with their square root. At least 2.
            num_steps: of Lanczos' method for each. Each takes two backward passes. Too few leave a bias, which the
                standard error does not show, where J has singular values close to 0.
            generator: for the probes, on x's device.
        """
        self._check(x)
        if exact is not True and num_probes < 2:
            raise ValueError(f"num_probes = {num_probes} is not allowed: at least 2, for a standard error")
        check_positive("num_steps", num_steps)
        if len(x) == 0:
            raise ValueError("x has no images, which is not allowed")
        options = self.patch_size, self.channels == "batch", self.activation, self.expansion
        blocks = [
            [None if weight is None else weight.detach().double() for weight in block._weights()]
            for block in (self, *self.further)
        ]

        def function(images: Tensor) -> Tensor:
            for weights in blocks:
                images = reference.saib(images, *weights, *options)
            return images

        return log_abs_det_jacobian(
            function,
            x.double(),
            num_blocks=len(blocks),
            per_image=self.channels == "patch",
            exact=exact,
            num_probes=num_probes,
            num_steps=num_steps,
            generator=generator,
        )

    def _weights(self) -> tuple[Tensor | None, ...]:
        return self.position, self.w1, self.w2, self.w3, self.w4

    def _check(self, x: Tensor) -> None:
        check_image(x, self.patch_size)
        n, image_channels, *image_size = x.shape
        if image_channels != IMAGE_CHANNELS:
            raise ValueError(
                f"x has {image_channels} channels, which is not allowed: SAIB was built for {IMAGE_CHANNELS}"
            )
        if tuple(image_size) != self.image_size:
            raise ValueError(
                f"x has {image_size[0]} x {image_size[1]} pixels, which is not allowed: this SAIB was built for "
                f"{self.image_size[0]} x {self.image_size[1]}"
            )
        if self.channels == "batch" and n != self.batch_size:
            raise ValueError(
                f"x has {n} images, which is not allowed: this SAIB was built for batches of {self.batch_size}, the "
                'channels of its convolutions. Leave out a short last batch (drop_last=True), or use channels="patch"'
            )

    def extra_repr(self) -> str:
        height, width = self.image_size
        batch = f", batch_size={self.batch_size}" if self.channels == "batch" else ""
        return (
            f"channels={self.channels!r}{batch}, patch_size={self.patch_size}, image_size=({height}, {width}), "
            f"activation={self.activation!r}, expansion={self.expansion!r}, cascade={1 + len(self.further)}, "
            f"positional={self.position is not None}"
        )
