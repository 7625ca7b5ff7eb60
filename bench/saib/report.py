"""The comparison tables of SAIB, on the GPU where there is one."""

import torch

from bench.device import captured
from bench.measure import Table, compare
from bench.saib import peers


def tables(rounds: int, compile_peers: bool):
    """Yields tables and remarks in Markdown."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for case in peers.GPU_CASES if device == "cuda" else peers.CPU_CASES:
        functions = {name: peers.with_gradient(form, case, device) for name, form in peers.FORMS.items()}
        if device == "cuda":
            for name in ("iecl_fast", "chain, channels last"):
                functions[f"{name}, graph"] = captured(functions[name])
        if compile_peers or (device == "cuda" and case in peers.TUNED_CASES):
            functions["chain, max-autotune"] = peers.with_gradient(peers.compiled, case, device)
        results = compare(functions, rounds, device)
        yield Table(f"SAIB, {case}, {device}, forward + backward", "chain", results)
        rate = case.operations / min(results["iecl_fast"].seconds) / 1e9
        yield f"Best round of iecl_fast: {rate:.0f} GFLOP/s, counting the operations of the direct form.\n"
