"""The comparison tables of SAIB, on the GPU where there is one."""

from dataclasses import replace

import torch

from bench.measure import compare, table
from bench.saib import peers


def tables(rounds: int, compile_peers: bool):
    """Yields Markdown, table by table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for case in peers.GPU_CASES if device == "cuda" else peers.CPU_CASES:
        forms = {"chain": peers.Chain, **peers.FORMS}
        if compile_peers:
            forms["chain, compiled"] = peers.compiled
        functions = {name: peers.with_gradient(form, case, device) for name, form in forms.items()}
        results = compare(functions, rounds)
        if device == "cuda":
            results = {
                name: replace(result, peak=peers.peak_device_memory(functions[name]))
                for name, result in results.items()
            }
        yield table(f"SAIB, {case}, {device}, forward + backward", "chain", results)
        rate = case.operations / min(results["iecl_fast"].seconds) / 1e9
        yield f"Best round of iecl_fast: {rate:.0f} GFLOP/s, counting the operations of the direct form.\n"
