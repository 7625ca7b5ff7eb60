"""SAIB as a function of its weights: arguments checked, then one operator."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

import iecl_fast.saib.ops  # noqa: F401  (registers the operators)

CHANNELS = ("batch", "patch")
ACTIVATIONS = ("relu", "silu")
EXPANSIONS = ("free", "monotone")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def saib(
    x: Tensor,
    position: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    w4: Tensor | None,
    *,
    patch_size: int,
    channels: str = "batch",
    activation: str = "relu",
    expansion: str = "free",
) -> Tensor:
    """The entropy-generating block of IE-CL: one application, with the weights given. See SAIB for the formulas.

    Args:
        x: (N, C, H, W), float32, float16, bfloat16 or float64, any strides; ``patch_size`` divides H and W.
        position: (R, p*p) with R = C * (H/p) * (W/p), or None for no embedding.
        w1, w2, w3, w4: (D, D, 1, 1), (2D, D, 3, 3), (2D, 2D, 1, 1), (D, 2D, 1, 1), of x's dtype and device. D is N with
            ``channels="batch"``, C*p*p with ``channels="patch"``. ``expansion="monotone"`` has no w4: None.
        patch_size: p.
        channels: "batch" or "patch".
        activation: "relu" or "silu"; "monotone" allows only "relu".
        expansion: "free" or "monotone".

    Returns:
        A tensor like x, in its memory format. Differentiable, once, in x, position and the weights. Under autocast it
        is computed and returned in the autocast dtype, as a convolution is.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.
    """
    check_options(channels, activation, expansion)
    tensors = {"x": x, "position": position, "w1": w1, "w2": w2, "w3": w3, "w4": w4}
    optional = {"position"} if expansion == "free" else {"position", "w4"}
    for name, tensor in tensors.items():
        if tensor is None and name in optional:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, which is not allowed: a tensor")
    if expansion == "monotone" and w4 is not None:
        raise ValueError('w4 is not allowed with expansion = "monotone", which ends with w1 transposed: None')
    check_image(x, patch_size)
    n, image_channels, height, width = x.shape
    rows = image_channels * (height // patch_size) * (width // patch_size)
    if channels == "batch":
        wide, meaning = n, "the batch size"
    else:
        wide, meaning = image_channels * patch_size**2, "channels * patch_size^2"
    shapes = {
        "position": (rows, patch_size**2),
        "w1": (wide, wide, 1, 1),
        "w2": (2 * wide, wide, 3, 3),
        "w3": (2 * wide, 2 * wide, 1, 1),
        "w4": (wide, 2 * wide, 1, 1),
    }
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f'{name} has the shape {tuple(tensor.shape)}, which is not allowed with channels = "{channels}" and '
                f"D = {wide}, {meaning}: {shape}"
            )
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} and x on {x.device}: one device is allowed")
        if tensor.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"{name} is {tensor.dtype} and x {x.dtype}: one dtype is allowed, or autocast")
    present = [tensor for tensor in tensors.values() if tensor is not None]
    _refuse_tangents(present)
    save = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in present)
    output, _ = torch.ops.iecl_fast.saib(
        *tensors.values(), patch_size, channels == "batch", activation, expansion, save
    )
    return output


def check_options(channels: str, activation: str, expansion: str) -> None:
    """ValueError unless each is known and the two last go together."""
    for name, value, allowed in (
        ("channels", channels, CHANNELS),
        ("activation", activation, ACTIVATIONS),
        ("expansion", expansion, EXPANSIONS),
    ):
        if value not in allowed:
            raise ValueError(f"{name} = {value!r} is not allowed: {' or '.join(map(repr, allowed))}")
    if expansion == "monotone" and activation != "relu":
        raise ValueError(
            f'activation = {activation!r} is not allowed with expansion = "monotone", which needs one that never falls '
            "(SiLU has slopes down to -0.1): 'relu'"
        )


def check_positive(name: str, value: int) -> None:
    """TypeError unless the argument ``name`` is an int, ValueError unless it is at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a {type(value).__name__}, which is not allowed: an int")
    if value < 1:
        raise ValueError(f"{name} = {value} is not allowed: at least 1")


def check_image(x: Tensor, patch_size: int) -> None:
    """ValueError or TypeError unless x is (N, C, H, W) of a dtype that SAIB takes, to be divided into patches."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}, which is not allowed: a tensor")
    if x.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"x is {x.dtype}, which is not allowed: {names}")
    if x.dim() != 4:
        raise ValueError(f"x has the shape {tuple(x.shape)}, which is not allowed: (N, channels, height, width)")
    check_positive("patch_size", patch_size)
    check_divisible("x", x.shape[2], x.shape[3], patch_size)


def check_divisible(name: str, height: int, width: int, patch_size: int) -> None:
    """ValueError unless ``patch_size`` divides the sides of the images in the argument ``name``."""
    if height < 1 or width < 1 or height % patch_size or width % patch_size:
        raise ValueError(
            f"{name} has {height} x {width} pixels, which is not allowed: multiples of patch_size = {patch_size}"
        )


def _refuse_tangents(tensors: list[Tensor]) -> None:
    """Custom operators drop the tangents of forward-mode differentiation without a word."""
    if torch.compiler.is_compiling() or getattr(forward_ad, "_current_level", -1) < 0:
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise RuntimeError("iecl_fast.saib has no forward-mode derivative; use backward(), or saib.reference")
