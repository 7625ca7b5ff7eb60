"""Data on which selection goes wrong, and the layouts it comes in."""

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = ("random", "unit", "ties", "constant", "zeros", "signed_zeros", "infinite", "nan", "sorted", "huge")


def query_and_keys(kind: str, n: int, k: int, c: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(N, C) and (K, C). Apart from "random", "unit" and "huge" all similarities are exact in float32, in any order."""
    query, keys = torch.randint(-2, 3, (n, c)).float(), torch.randint(-2, 3, (k, c)).float()
    if kind in ("random", "unit"):
        query, keys = torch.randn(n, c), torch.randn(k, c)
    if kind == "unit":
        query, keys = F.normalize(query, dim=1), F.normalize(keys, dim=1)
    elif kind == "constant":
        keys = keys[:1].expand(k, c).clone()
    elif kind == "zeros":
        query.zero_()
    elif kind == "signed_zeros":
        # One channel only, so that the dot product is the product: -0, +0 and a few others.
        query, keys = torch.zeros(n, c), torch.zeros(k, c)
        query[:, 0] = 1
        keys[:, 0] = torch.tensor([-0.0, 0.0, 1.0, -1.0])[torch.randint(0, 4, (k,))]
        keys[:, 1:] = -0.0
    elif kind == "infinite":
        query = query.abs() + 1
        keys[torch.rand(k) < 0.25] = torch.inf
        keys[torch.rand(k) < 0.25] = -torch.inf
    elif kind == "nan":
        keys[torch.rand(k) < 0.1] = torch.nan
        keys[torch.rand(k) < 0.1, 0] = -torch.nan
        query[-1] = torch.nan
    elif kind == "sorted":
        keys = keys[keys.sum(1).argsort()]
        query = torch.ones(n, c)
    elif kind == "huge":
        limit = torch.finfo(dtype).max
        query, keys = torch.randn(n, c).sign() * limit, torch.randn(k, c).sign() * limit
    return query.to(dtype), keys.to(dtype)


def layouts(keys: Tensor) -> dict[str, tuple[Tensor, dict]]:
    """The same keys in other memory layouts, each with the arguments it needs."""
    k, c = keys.shape
    wide = torch.full((k, c + 5), torch.nan, dtype=keys.dtype)
    wide[:, 2 : c + 2] = keys
    sparse = torch.full((k, 3 * c), torch.nan, dtype=keys.dtype)
    sparse[:, ::3] = keys
    return {
        "contiguous": (keys, {}),
        "channels first": (keys.T.contiguous(), {"layout": "CK"}),
        "transposed view": (keys.T.contiguous().T, {"layout": "KC"}),
        "row stride": (wide[:, 2 : c + 2], {"layout": "KC"}),
        "channel stride": (sparse[:, ::3], {"layout": "KC"}),
    }
