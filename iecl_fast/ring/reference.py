"""What the Ring operators compute, in plain PyTorch, any device, any dtype: what every kernel is tested against.

Wu et al., "Conditional Negative Sampling for Contrastive Learning of Visual Representations": of all keys only those
whose similarity to the query lies between two percentiles serve as negatives.
"""

import torch
from torch import Tensor

from iecl_fast.ring.percentiles import ring_ranks


def similarity(query: Tensor, keys: Tensor) -> Tensor:
    """(N, C) and (K, C) to (N, K), accumulated in float32 for 16-bit inputs."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.to(dtype) @ keys.to(dtype).T


def member_mask(similarities: Tensor, lower: float, upper: float, exclude: Tensor | None = None) -> Tensor:
    """Which keys are in each query's ring: (N, K) bool.

    Ranks ascend by (similarity, key index), as a stable sort has it: NaN is above +inf, -0 equals +0.
    """
    num_keys = similarities.shape[1]
    rank = similarities.argsort(dim=1, stable=True).argsort(dim=1)
    if exclude is None:
        first, end = ring_ranks(lower, upper, num_keys)
        return (rank >= first) & (rank < end)
    excludes = exclude[:, None] >= 0
    own = torch.arange(num_keys, device=similarities.device) == exclude[:, None]
    own_rank = rank.gather(1, exclude[:, None].clamp(min=0))
    rank = rank - ((rank > own_rank) & excludes).to(rank.dtype)
    first, end = ring_ranks(lower, upper, num_keys) if (exclude < 0).any() else (0, 0)
    first_of_rest, end_of_rest = ring_ranks(lower, upper, num_keys - 1) if (exclude >= 0).any() else (0, 0)
    return (
        (rank >= torch.where(excludes, first_of_rest, first)) & (rank < torch.where(excludes, end_of_rest, end)) & ~own
    )


def ring_sample(
    query: Tensor,
    keys: Tensor,
    lower: float,
    upper: float,
    exclude: Tensor | None = None,
    uniform: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Similarities and indices of the ring's members in ascending index: (N, M) each.

    With ``uniform`` (N, S), numbers in [0, 1), those at the positions ``floor(uniform * M)``, M being each row's own.
    """
    similarities = similarity(query, keys)
    mask = member_mask(similarities, lower, upper, exclude)
    sizes = mask.sum(dim=1, keepdim=True)
    members_first = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    if uniform is None:
        indices = members_first[:, : int(sizes.min()) if len(sizes) else 0]
    else:
        indices = members_first.gather(1, (uniform * sizes).long().clamp(max=sizes - 1))
    return similarities.gather(1, indices), indices


def ring_info_nce(
    query: Tensor,
    positive_key: Tensor,
    keys: Tensor,
    temperature: Tensor | float,
    lower: float,
    upper: float,
    exclude: Tensor | None = None,
) -> Tensor:
    """Loss of each query: (N,)."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    similarities = similarity(query, keys)
    mask = member_mask(similarities, lower, upper, exclude)
    positive = (query.to(dtype) * positive_key.to(dtype)).sum(dim=1, keepdim=True)
    negatives = (similarities / temperature).masked_fill(~mask, -torch.inf)
    positive = positive / temperature
    return torch.cat([positive, negatives], dim=1).logsumexp(dim=1) - positive[:, 0]
