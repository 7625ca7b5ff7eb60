"""Detectron2's pickles of a ResNet: its names for torchvision's tensors, and the file, read without running code."""

import io
import pickle
import re
from collections import OrderedDict

import numpy as np
import torch

from iecl_fast.engine.errors import UsageError

NUMBERS = {f"{kind}{size}" for kind, sizes in (("f", (2, 4, 8)), ("i", (1, 2, 4, 8)), ("u", (1,))) for size in sizes}


def detectron2_name(name):
    """Detectron2's name of a tensor of torchvision's ResNet: ``layer1.0.bn2.bias`` is ``res2.0.conv2.norm.bias``."""
    stage = re.match(r"layer(\d+)\.", name)
    head = "stem." if stage is None else f"res{int(stage[1]) + 1}."  # the stem counts as the first
    rest = name if stage is None else name[stage.end() :]
    rest = re.sub(r"\bbn(\d+)\.", r"conv\1.norm.", rest)
    return head + rest.replace("downsample.0.", "shortcut.").replace("downsample.1.", "shortcut.norm.")


def dump(state):
    """The pickle that Detectron2 takes as MODEL.WEIGHTS, as bytes.

    Its arrays are built by ``numpy.ndarray`` from bytes: numpy's own way of pickling writes the name of a module that
    NumPy 1 and NumPy 2 have in different places, and an old one then cannot read what a new one wrote.

    Args:
        state: dict from torchvision's names to CPU tensors.
    """
    model = {detectron2_name(name): tensor.numpy() for name, tensor in state.items()}
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump({"model": model, "__author__": "iecl_fast", "matching_heuristics": True})
    return buffer.getvalue()


def load(data, source):
    """The tensors of a pickle; those that NumPy has pickled in its own way are read too.

    A pickle may name any function to be called. Here the names of NumPy's arrays and types stand for classes that
    only note what they are given, every other name is refused, and arrays are made of bytes, a shape and a type.

    Args:
        data: bytes.
        source: the file, for messages.

    Returns:
        dict from Detectron2's names to CPU tensors.

    Raises:
        UsageError: anything else than Detectron2's dict of arrays is in it.
    """
    try:
        content = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # an unpickler that meets damaged bytes may raise anything
        raise UsageError(f"{source} cannot be read as a Detectron2 pickle: {_first_line(error)}") from None
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or not all(isinstance(name, str) for name in model):
        raise UsageError(f"{source} is no Detectron2 pickle: it must hold a dict 'model' from names to arrays")
    state = {}
    for name, array in model.items():
        try:
            if not isinstance(array, _Array):
                raise ValueError(f"{type(array).__name__} is not allowed, it must be an array")
            state[name] = array.tensor()
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{source} is damaged: {name}: {_first_line(error)}") from None
    return state


def _first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class _Pickler(pickle.Pickler):
    def reducer_override(self, value):
        if isinstance(value, np.ndarray):
            return np.ndarray, (value.shape, value.dtype.str, bytearray(value.tobytes()))
        return NotImplemented


class _Type:
    """In place of ``numpy.dtype``."""

    def __init__(self, code, *_):
        self.code, self.order = code, "="

    def __setstate__(self, state):
        self.order = state[1]


class _Array:
    """In place of ``numpy.ndarray``: its shape, type, bytes and whether the first axis is the fastest."""

    def __init__(self, shape, dtype, data):
        self.shape, self.dtype, self.data, self.fortran = shape, dtype, data, False

    def __setstate__(self, state):
        _, self.shape, self.dtype, self.fortran, self.data = state

    def tensor(self):
        code, order = (self.dtype.code, self.dtype.order) if isinstance(self.dtype, _Type) else (self.dtype, "")
        if not isinstance(code, str) or code.lstrip("<>=|") not in NUMBERS:
            raise ValueError(f"type {code!r} is not allowed, it must be one of {', '.join(sorted(NUMBERS))}")
        if not isinstance(self.data, (bytes, bytearray)) or not isinstance(self.shape, tuple):
            raise ValueError("an array must have bytes and a shape")
        flat = np.frombuffer(self.data, np.dtype(order.strip("|") + code))
        array = flat.reshape(self.shape, order="F" if self.fortran else "C")
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))


class _Reconstructed(_Array):
    """In place of ``_reconstruct``: an empty array, to which all is given afterwards."""

    def __init__(self, *_):
        pass


class _FromBuffer(_Array):
    """In place of ``_frombuffer``."""

    def __init__(self, data, dtype, shape, order):
        super().__init__(shape, dtype, data)
        self.fortran = order == "F"


class _Unpickler(pickle.Unpickler):
    """Knows a few names, all of which are classes: attributes of a function could be changed by a pickle."""

    NAMES = {("numpy", "ndarray"): _Array, ("numpy", "dtype"): _Type, ("collections", "OrderedDict"): OrderedDict} | {
        (f"numpy.{core}.{module}", name): cls
        for core in ("core", "_core")
        for module, name, cls in (
            ("multiarray", "_reconstruct", _Reconstructed),
            ("numeric", "_frombuffer", _FromBuffer),
        )
    }

    def find_class(self, module, name):
        if (module, name) not in self.NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}; allowed are NumPy's arrays and plain values")
        return self.NAMES[module, name]
