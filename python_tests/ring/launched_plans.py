"""Launches of every Triton kernel of Ring, recorded: nothing runs."""

import torch
from ahead_of_time import Call, recorded_calls

from iecl_fast.ring import dispatch, plans, triton_info_nce

N, K = 256, 65536
CHANNELS = (128, 256)  # one for each size of tile
RANKS = [58983, 64881, 58982, 64880]


def launch_plans(monkeypatch, dtype, channels, key_major=True, exclude=None, with_gradient=True):
    """Both plans of the loss, the keys' gradient, samples and their gradients, with selection in Triton."""
    kernels = dispatch.triton_kernels()
    query = torch.empty(N, channels, dtype=dtype)
    keys = torch.empty(K, channels, dtype=dtype) if key_major else torch.empty(channels, K, dtype=dtype).T
    temperature = torch.tensor(0.07, dtype=torch.float64)
    triton_info_nce.write_similarities(query, keys, torch.empty(N, K), plans.precision(dtype))
    for cached_bytes in (0, 2**40):
        monkeypatch.setattr(plans, "WRITTEN_BYTES", cached_bytes)
        loss, log_denominator, _ = plans.info_nce(
            query, query, keys, temperature, RANKS, exclude, with_gradient, kernels
        )
    plans.info_nce_keys_gradient(query, keys, temperature, RANKS, exclude, log_denominator, loss, kernels)
    values, indices = plans.sample(query, keys, RANKS, exclude, None, True, kernels)
    kernels.sample_query_gradient(values, indices.zero_(), keys)
    kernels.sample_keys_gradient(values[:, :2].contiguous(), indices[:, :2], query, K)


def calls_of(monkeypatch, dtype, precision, channels=CHANNELS, **options) -> list[Call]:
    """All calls that differ."""
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(plans, "precision", lambda dtype: precision)
        patch.setattr(torch, "mm", lambda *_, out: out)  # not what is tested here, and long on a CPU
        for count in channels:
            calls += recorded_calls(patch, lambda count=count: launch_plans(patch, dtype, count, **options))
    return list(dict.fromkeys(calls))
