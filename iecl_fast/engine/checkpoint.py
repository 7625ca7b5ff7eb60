"""Checkpoints that are there whole or not at all.

Formats, as the entry "format" counts them:

1. the first.
2. has also "faults", what the run has gone past, and among "versions" iecl_fast's own.
"""

import os
import pickle
import random
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from iecl_fast import __version__
from iecl_fast.engine.errors import Interrupted, UsageError

FORMAT = 2
# What a checkpoint holds, and of what type it must be to go on from.
PARTS = {
    "config": dict,
    "faults": dict,
    "method": dict,
    "optimizer": dict,
    "precision": dict,
    "rng": list,
    "samples": int,
    "seconds": float,
    "step": int,
    "untrained": dict | None,
    "versions": dict,
}

TEMPORARY = ".tmp"


@contextmanager
def whole_file(path):
    """Open a new file for writing that takes the name `path` only when all of it is on the disk.

    The bytes go to a temporary file in the same folder, are flushed to the disk, and the file is renamed over `path`.
    Killed at any moment, `path` is the old file or the new one. On an error the temporary file is removed; one that a
    killed process left is overwritten, or removed by :func:`remove_leftovers`.

    Raises:
        OSError: with the path, as on a full disk.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        with naming(path), open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


@contextmanager
def naming(path):
    """Context whose OSError names a file, which one of a failed write or flush does not do by itself."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def is_leftover(path):
    """Whether a file is the beginning of one that :func:`whole_file` was killed in."""
    return path.name.startswith(".") and path.name.endswith(TEMPORARY)


def remove_leftovers(*folders):
    """Remove what a killed :func:`whole_file` has left in some folders."""
    for folder in folders:
        for path in filter(is_leftover, folder.iterdir() if folder.is_dir() else ()):
            path.unlink()


def _flush_folder(folder):
    """Bring a rename to the disk, where the system has folders that can be opened."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def save_checkpoint(path, state):
    """Write a dict of tensors and plain values, whole or not at all.

    Raises:
        OSError: it cannot be written, as on a full disk.
    """
    with whole_file(path) as file:
        try:
            torch.save({"format": FORMAT, **state}, file)
        except RuntimeError as error:
            # torch closes its archive after a failed write, fails again, and so hides the first reason: disk or signal.
            if isinstance(error.__context__, (OSError, Interrupted)):
                raise error.__context__ from None
            raise


def load_checkpoint(path):
    """Read a checkpoint to the CPU. Only tensors and plain values are unpickled: no code in it can run.

    Every byte counts: what a file is made of carries checksums (CRC-32), which torch writes and does not look at.

    Raises:
        UsageError: not there, cut short or changed, of a newer version, or not a checkpoint of this package.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no checkpoint {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            if (changed := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"the checksum of {changed} is another one")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch's own words advise to run what is in it
        words = "tensors and plain values, and is not loaded: it is damaged, or another program's"
        raise UsageError(f"{path} is no checkpoint of iecl-fast pretrain: it holds more than {words}") from None
    except Exception as error:  # an unpickler that meets damaged bytes may raise anything
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"{path} cannot be read as a checkpoint, it is damaged or something else: {reason}") from None
    if not isinstance(state, dict) or "format" not in state:
        raise UsageError(f"{path} is no checkpoint of iecl-fast pretrain")
    _check_format(path, state)
    state = _migrate(state)
    if missing := PARTS.keys() - state.keys():
        raise UsageError(f"{path} is damaged, it lacks: {', '.join(sorted(missing))}")
    for name, kind in PARTS.items():
        if not isinstance(state[name], kind):
            raise UsageError(f"{path} is damaged, its {name} is of the type {type(state[name]).__name__}")
    return state


def _check_format(path, state):
    """Refuse a format that this version does not know."""
    number = state["format"]
    if number in range(1, FORMAT + 1):
        return
    versions = state.get("versions")
    writer = versions.get("iecl_fast", "another version") if isinstance(versions, dict) else "another version"
    raise UsageError(
        f"{path} has format {number!r}, written by iecl_fast {writer}; iecl_fast {__version__} reads formats 1 to "
        f"{FORMAT}: take the version that wrote it"
    )


def _migrate(state):
    """A checkpoint of an older format as one of this format."""
    if state["format"] == 1:
        state = state | {"faults": {"unreadable": [], "skipped_steps": 0, "skipped_in_a_row": 0}, "format": 2}
    return state


def load_part(module, state, path):
    """Give a module or optimiser its part of a checkpoint.

    Raises:
        UsageError: the part is another one's, or incomplete.
    """
    try:
        module.load_state_dict(state)
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path} does not fit {type(module).__name__}: {reason}") from None


def get_rng_state(device):
    """States of the generators of Python, NumPy, torch and, when `device` is one, the CUDA device. Plain values."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_rng_state(state, device):
    """Put back what `get_rng_state` gave; a CUDA state only where the run is on such a device again.

    Raises:
        UsageError: the state is none.
    """
    try:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if device.type == "cuda" and state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"], device)
    except (RuntimeError, LookupError, ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"the checkpoint's states of random generators are damaged: {error}") from None
