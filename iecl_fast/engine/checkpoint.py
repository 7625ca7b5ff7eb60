"""Checkpoints that are there whole or not at all."""

import os
import random
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from iecl_fast.engine.errors import UsageError

FORMAT = 1
PARTS = {"config", "method", "optimizer", "precision", "rng", "samples", "seconds", "step", "untrained"}


@contextmanager
def whole_file(path):
    """Open a new file for writing that takes the name `path` only when all of it is on the disk.

    The bytes go to a temporary file in the same folder, are flushed to the disk, and the file is renamed over `path`.
    Killed at any moment, `path` is the old file or the new one. On an error the temporary file is removed; one that a
    killed process left is overwritten.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def _flush_folder(folder):
    """Bring a rename to the disk, where the system has folders that can be opened."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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


def save_checkpoint(path, state):
    """Write a dict of tensors and plain values, whole or not at all.

    Raises:
        OSError: it cannot be written, as on a full disk.
    """
    with whole_file(path) as file:
        try:
            torch.save({"format": FORMAT, **state}, file)
        except RuntimeError as error:
            # torch closes its archive after a failed write, fails again, and so hides what the system said.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def load_checkpoint(path):
    """Read a checkpoint to the CPU. Only tensors and plain values are unpickled: no code in it can run.

    Raises:
        UsageError: not there, cut short, or not a checkpoint of this package.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no checkpoint {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # an unpickler that meets damaged bytes may raise anything
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"{path} cannot be read as a checkpoint, it is damaged or something else: {reason}") from None
    if not isinstance(state, dict) or "format" not in state:
        raise UsageError(f"{path} is no checkpoint of iecl-fast pretrain")
    if state["format"] != FORMAT:
        raise UsageError(f"{path} has format {state['format']}, this version reads format {FORMAT}")
    if missing := PARTS - state.keys():
        raise UsageError(f"{path} is damaged, it lacks: {', '.join(sorted(missing))}")
    return state


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
    """Put back what `get_rng_state` gave; a CUDA state only where the run is on such a device again."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
