"""A checkpoint's backbone as a file of its own, in the formats of other libraries, and back."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from iecl_fast.engine.checkpoint import load_checkpoint, whole_file
from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.folder import check_new_file
from iecl_fast.evaluate import detectron2
from iecl_fast.evaluate.restore import checkpoint_path, plain_resnet
from iecl_fast.ssl.encoders import BACKBONES, build_backbone

# Format to the name of the file beside the checkpoint.
FORMATS = {"torchvision": "backbone.pth", "detectron2": "backbone.pkl", "safetensors": "backbone.safetensors"}
METADATA = ("arch", "width", "stem", "mean", "std", "step")


@dataclass(frozen=True)
class BackboneFile:
    """What an exported file holds.

    Attributes:
        state: the file's names to CPU tensors; what is exported has no classifier.
        name, stem, width: as :func:`iecl_fast.ssl.build_backbone` has them.
        mean, std: of the images, per channel, of values in 0..1; None where the format has no place for them.
        step: optimiser steps of the training; None likewise.
        name_in_file: from torchvision's name of a tensor to the file's, which differs for detectron2 alone.
    """

    state: dict[str, Tensor]
    name: str
    stem: str
    width: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    step: int | None = None
    name_in_file: Callable[[str], str] = str


def export_checkpoint(checkpoint, file_format, output=None):
    """Write the backbone of a checkpoint, whole or not at all.

    Spectral normalisation is folded into plain weights. Projection head, SAIB and momentum encoder stay behind. The
    data of the run need not be there.

    Args:
        checkpoint: a checkpoint file, or a run folder.
        file_format: a key of `FORMATS`.
        output: the file; None takes the format's name beside the checkpoint file, or in the run folder.

    Returns:
        (path of the file, `BackboneFile` with all that is known).

    Raises:
        UsageError: no checkpoint, an unknown format, a file in the way, a backbone that is no ResNet.
        OSError: it cannot be written.
    """
    if file_format not in FORMATS:
        raise UsageError(f"format: {file_format!r} is not allowed, it must be one of {', '.join(FORMATS)}")
    if file_format == "safetensors":
        _safetensors()  # what is missing is said before the work
    given = Path(checkpoint)
    target = Path(output) if output is not None else (given if given.is_dir() else given.parent) / FORMATS[file_format]
    check_new_file(target)
    path = checkpoint_path(checkpoint)
    exported = _backbone_of(load_checkpoint(path), path)
    data = _encode(exported, file_format)
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as file:
        file.write(data)
    return target, exported


def _backbone_of(checkpoint, path):
    backbone, config = plain_resnet(checkpoint, path)
    return BackboneFile(
        state={name: tensor.detach().clone().contiguous() for name, tensor in backbone.state_dict().items()},
        name=config.encoder.name,
        stem=config.encoder.stem,
        width=config.encoder.width,
        mean=tuple(config.views["mean"]),
        std=tuple(config.views["std"]),
        step=checkpoint["step"],
    )


def _encode(exported, file_format):
    """The bytes of the file."""
    if file_format == "detectron2":
        return detectron2.dump(exported.state)
    if file_format == "torchvision":
        buffer = io.BytesIO()
        torch.save(exported.state, buffer)
        return buffer.getvalue()
    values = (exported.name, exported.width, exported.stem, exported.mean, exported.std, exported.step)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in zip(METADATA, values)}
    import safetensors.torch

    return safetensors.torch.save(exported.state, metadata={"format": "pt", **texts})


def _safetensors():
    try:
        import safetensors
    except ModuleNotFoundError:
        raise UsageError("the format safetensors needs a package that is missing: pip install safetensors") from None
    return safetensors


def read_backbone(path):
    """Read a file of one of the formats; which one its first bytes tell. No code in it can run.

    A torchvision or Detectron2 file does not say what network it is of: that is told from its names and shapes.

    Returns:
        `BackboneFile`. Its tensors are not yet compared with the network: :func:`load_strictly` does that.

    Raises:
        UsageError: not there, damaged, or something else.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    with open(path, "rb") as file:
        start = file.read(9)
    if start[8:] == b"{":
        return _read_safetensors(path)
    if start.startswith(b"\x80"):
        state, name_in_file = detectron2.load(path.read_bytes(), path), detectron2.detectron2_name
    else:
        state, name_in_file = _read_torch(path), str
    return BackboneFile(state, *_architecture(state, path, name_in_file), name_in_file=name_in_file)


def _read_torch(path):
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # an unpickler that meets damaged bytes may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"{path} cannot be read as a torchvision, Detectron2 or safetensors file: {reason}") from None
    entries = state.items() if isinstance(state, dict) else [(None, state)]
    if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in entries):
        raise UsageError(f"{path} is no state_dict: it must hold a dict from names to tensors, and nothing else")
    return dict(state)


def _read_safetensors(path):
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
            metadata = file.metadata() or {}
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as safetensors, it is damaged: {error}") from None
    if "arch" not in metadata:  # another library's
        return BackboneFile(state, *_architecture(state, path, str))
    if missing := [key for key in METADATA if key not in metadata]:
        raise UsageError(f"{path} is damaged, its metadata lacks: {', '.join(missing)}")
    try:
        width, mean, std, step = (json.loads(metadata[key]) for key in ("width", "mean", "std", "step"))
        mean, std = tuple(map(float, mean)), tuple(map(float, std))
        return BackboneFile(state, metadata["arch"], metadata["stem"], int(width), mean, std, int(step))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} is damaged, its metadata cannot be read: {error}") from None


def _architecture(state, path, name_in_file):
    """(name, stem, width) of the network whose names are nearest, and that begins with that convolution."""
    first = state.get(name_in_file("conv1.weight"))
    if first is None or first.dim() != 4:
        words = f"{name_in_file('conv1.weight')} of four dimensions"
        raise UsageError(f"{path} lacks {words}: it holds no ResNet, or not all of it")
    names = {}
    for name in BACKBONES:
        with torch.device("meta"):
            names[name] = set(map(name_in_file, build_backbone(name, width=1).state_dict()))
    nearest = min(names, key=lambda name: len(names[name] ^ state.keys()))
    return nearest, "imagenet" if first.shape[-1] == 7 else "small", first.shape[0]


def load_backbone(path, *, allow_missing=(), allow_unexpected=()):
    """The network of an exported file, in evaluation mode, on the CPU: its outputs are those of the checkpoint's.

    torchvision's own weights, which have a classifier, are read with ``allow_unexpected=("fc.weight", "fc.bias")``.

    Args:
        path: a file in one of the `FORMATS`.
        allow_missing, allow_unexpected: names in the file of tensors that may be absent, and keep their random values,
            and of those that may be there, and are ignored.

    Returns:
        :class:`iecl_fast.ssl.ResNetBackbone`.

    Raises:
        UsageError: not there, damaged, or not exactly the tensors of the network.
    """
    content = read_backbone(path)
    try:
        backbone = build_backbone(content.name, content.stem, content.width)
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    load_strictly(
        backbone,
        content.state,
        path,
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
        name_in_file=content.name_in_file,
    )
    return backbone.eval()


def load_strictly(module, state, source, *, allow_missing=(), allow_unexpected=(), name_in_file=str):
    """Give a module all of its tensors; where they do not fit it stays as it was, and all that differs is listed.

    Args:
        module: any module.
        state: dict from names to tensors.
        source: where they come from, for the message.
        allow_missing, allow_unexpected: names that `state` may lack, and may have beside the module's.
        name_in_file: from the module's names to those of `state`, where they differ.

    Raises:
        UsageError: tensors are missing, unexpected, or of another shape or dtype.
    """
    for argument, names in (("allow_missing", allow_missing), ("allow_unexpected", allow_unexpected)):
        if isinstance(names, str):
            raise TypeError(f"{argument} = {names!r} is not allowed: a list of names")
    own = {name_in_file(name): (name, tensor) for name, tensor in module.state_dict().items()}
    shared = [name for name in own if name in state]
    faults = {
        "it lacks": [name for name in own if name not in state and name not in allow_missing],
        "nothing takes": [name for name in state if name not in own and name not in allow_unexpected],
        "of another kind are": [
            f"{name} ({_kind(state[name])} instead of {_kind(own[name][1])})"
            for name in shared
            if _kind(state[name]) != _kind(own[name][1])
        ],
    }
    if any(faults.values()):
        words = "; ".join(f"{fault} {', '.join(names)}" for fault, names in faults.items() if names)
        raise UsageError(f"{source} does not fit {type(module).__name__}: {words}")
    module.load_state_dict({own[name][0]: state[name] for name in shared}, strict=False)


def _kind(tensor):
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
