"""Rows of similarities on which selection goes wrong, and the places of ranks in them by plain PyTorch."""

import torch
from torch import Tensor

KINDS = (
    "unit",
    "ties",
    "constant",
    "two values",
    "signed zeros",
    "few infinite",
    "half infinite",
    "all infinite",
    "nan",
    "all nan",
    "sorted",
    "reversed",
    "outliers",
    "huge",
    "tiny",
    "equal leading bits",
)
LOWEST, HIGHEST = -(2**31), 2**31 - 1


def make_similarities(kind: str, n: int, k: int) -> Tensor:
    """(N, K) float32, from torch's generator."""
    unit = torch.randn(n, k) / 12
    chance = torch.rand(n, k)
    if kind == "ties":
        return torch.randint(-3, 4, (n, k)).float()
    if kind == "constant":
        return torch.full((n, k), 0.25)
    if kind == "two values":
        return torch.where(chance < 0.93, 0.5, -0.125)
    if kind == "signed zeros":
        return torch.tensor([-0.0, 0.0, 1.0, -1.0])[torch.randint(0, 4, (n, k))]
    if kind == "few infinite":
        return torch.where(chance < 0.1, torch.inf, torch.where(chance < 0.15, -torch.inf, unit))
    if kind == "half infinite":
        return torch.where(chance < 0.5, torch.inf, unit)
    if kind == "all infinite":
        return torch.where(chance < 0.5, torch.inf, -torch.inf)
    if kind == "nan":
        negative = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
        return torch.where(chance < 0.1, torch.nan, torch.where(chance < 0.2, negative, unit))
    if kind == "all nan":
        return torch.full((n, k), torch.nan)
    if kind == "sorted":
        return unit.sort(dim=1).values
    if kind == "reversed":
        return unit.sort(dim=1, descending=True).values
    if kind == "outliers":  # of which the sample of the range sees a few
        return torch.where(chance < 0.01, unit * 1e30, unit)
    if kind == "huge":
        return unit.sign() * torch.finfo(torch.float32).max * chance
    if kind == "tiny":
        return unit * 1e-40
    if kind == "equal leading bits":
        return 1 + torch.randint(0, 64, (n, k)) * torch.finfo(torch.float32).eps
    return unit


def layouts(matrix: Tensor) -> dict[str, Tensor]:
    """The same matrix in other memory layouts."""
    n, k = matrix.shape
    shifted = torch.full((n, k + 3), torch.nan, dtype=matrix.dtype)
    shifted[:, 1 : k + 1] = matrix
    sparse = torch.full((n, 2 * k), torch.nan, dtype=matrix.dtype)
    sparse[:, ::2] = matrix
    return {
        "contiguous": matrix,
        "not aligned": shifted[:, 1 : k + 1],
        "transposed": matrix.T.contiguous().T,
        "key stride": sparse[:, ::2],
    }


def order_keys(similarities: Tensor) -> Tensor:
    """int32 that ascend with the similarities: -0 as 0, NaN highest."""
    bits = (similarities + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & HIGHEST)).masked_fill(similarities.isnan(), HIGHEST)


def excludes_of(exclude: Tensor | None, row: int) -> bool:
    return exclude is not None and bool(exclude[row] >= 0)


def candidates_in_order(similarities: Tensor, exclude: Tensor | None) -> list[Tensor]:
    """For each row the indices of its candidates in ascending rank, as torch's stable sort has them."""
    order = similarities.argsort(dim=1, stable=True)
    return [o[o != exclude[row]] if excludes_of(exclude, row) else o for row, o in enumerate(order)]


def boundaries_of_ranks(similarities: Tensor, ranks: list[int], exclude: Tensor | None) -> tuple[Tensor, Tensor]:
    """What _ring_select has to return: thresholds (N, 2) int32 and ties (N, 2) int64."""
    keys = order_keys(similarities)
    places = []
    for row, order in enumerate(candidates_in_order(similarities, exclude)):
        for rank in ranks[2:] if excludes_of(exclude, row) else ranks[:2]:
            if rank == 0:
                places.append((LOWEST, 0))
            elif rank == len(order):
                places.append((HIGHEST, similarities.shape[1]))
            else:
                places.append((keys[row, order[rank]].item(), order[rank].item()))
    thresholds, ties = zip(*places) if places else ((), ())
    shape = (len(similarities), 2)
    return torch.tensor(thresholds, dtype=torch.int32).view(shape), torch.tensor(ties, dtype=torch.int64).view(shape)


def members(similarities: Tensor, ranks: list[int], exclude: Tensor | None) -> list[Tensor]:
    """For each row the ascending indices of its ring's members."""
    rows = []
    for row, order in enumerate(candidates_in_order(similarities, exclude)):
        lower, upper = ranks[2:] if excludes_of(exclude, row) else ranks[:2]
        rows.append(order[lower:upper].sort().values)
    return rows
