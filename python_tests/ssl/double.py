"""The methods in float64, the truth for tests: the operators by their definitions, nothing rounded to float32."""

import contextlib
from unittest import mock

import torch

import iecl_fast.ssl as methods
from iecl_fast.ring import reference
from iecl_fast.ssl import encoders


def _info_nce(query, positive_key, keys, *, lower, upper, temperature, exclude=None):
    return reference.ring_info_nce(query, positive_key, keys, temperature, float(lower), float(upper), exclude).mean()


def _sample(query, keys, lower, upper, *, num_samples=None, exclude=None, return_indices=False):
    uniform = None if num_samples is None else torch.rand(len(query), num_samples, dtype=torch.float64)
    similarities, indices = reference.ring_sample(query, keys, float(lower), float(upper), exclude, uniform)
    return (similarities, indices) if return_indices else similarities


def _normalize_rows(rows):
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)


@contextlib.contextmanager
def in_double():
    """Context in which a method that was made float64, by ``double()``, computes in float64 throughout."""
    replaced = [(encoders, "normalize_rows", _normalize_rows)]
    for name in ("moco", "simclr"):
        replaced.append((getattr(methods, name), "ring_info_nce", _info_nce))
    for name in ("bank", "local_aggregation"):
        replaced.append((getattr(methods, name), "ring_sample", _sample))
    for name in ("byol", "simsiam", "cmc"):
        replaced.append((getattr(methods, name), "normalize_rows", _normalize_rows))
    with contextlib.ExitStack() as stack:
        for module, name, function in replaced:
            stack.enter_context(mock.patch.object(module, name, function))
        yield
