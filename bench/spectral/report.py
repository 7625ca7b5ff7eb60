"""The comparison tables of spectral normalisation, on the GPU where there is one."""

import torch

from bench.device import captured
from bench.measure import Table, compare
from bench.spectral import peers

LARGE = 2**28  # bytes of a copy that no cache holds


def tables(rounds: int, compile_peers: bool):
    """Yields tables and remarks in Markdown."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in ("resnet18", "resnet50"):
        model = peers.network(name, device)
        layers, size = len(peers.convolutions(model)), peers.weight_bytes(model)
        forward = {
            "torch's loop": peers.torch_loop(model),
            "iecl_fast": peers.ours(model),
            "iecl_fast, operator alone": peers.operator(model),
            "foreach": peers.foreach(model),
        }
        if compile_peers:
            forward["torch's loop, compiled"] = peers.torch_loop(model, compiled=True)
        forward_and_backward = {key: peers.with_gradient(forward[key]) for key in ("torch's loop", "iecl_fast")}
        forward["large copy"] = peers.copy_of(LARGE, device)
        if device == "cuda":
            for key in ("torch's loop", "iecl_fast"):
                forward[f"{key}, CUDA graph"] = captured(forward[key])
        results = compare(forward, rounds, device)
        title = f"{name}, {layers} convolutions, {size / 1e6:.0f} MB, {device}"
        yield Table(f"{title}, forward", "torch's loop", results)
        yield bandwidth(results, size)
        yield Table(f"{title}, forward + backward", "torch's loop", compare(forward_and_backward, rounds, device))


def bandwidth(results, size: int) -> str:
    """Best rounds: what is moved per second, by the least that the algorithm has to move, against a large copy."""
    best = {name: min(result.seconds) for name, result in results.items()}
    copied = 2 * LARGE / best["large copy"]
    lines = [f"Best rounds; a copy of {LARGE / 1e6:.0f} MB moves {copied / 1e9:.1f} GB/s.", ""]
    for name in results:
        if not name.startswith("iecl_fast"):
            continue
        loop = "torch's loop, CUDA graph" if name.endswith("CUDA graph") else "torch's loop"
        ratio = best[name] / best[loop]
        moved = 2 * size / best[name]  # the second reading comes from a cache
        lines.append(f"* {name}: {best[name] * 1e3:.2f} ms, {ratio:.2f} of torch's; each weight read once and written")
        lines.append(f"  once: {moved / 1e9:.1f} GB/s, {moved / copied:.0%} of the copy's.")
    return "\n".join(lines) + "\n"
