"""The comparison tables of Ring: of the GPU where there is one, else of the CPU."""

import torch

from bench.measure import Table, compare
from bench.ring import gpu, peers
from bench.ring.peers import Case


def tables(rounds: int, compile_peers: bool):
    """Yields tables and remarks in Markdown."""
    return (gpu.tables if torch.cuda.is_available() else cpu_tables)(rounds, compile_peers)


def cpu_tables(rounds: int, compile_peers: bool):
    for case in (Case(), Case(lower=50, upper=90), Case(lower=0, upper=90)):
        yield Table(f"{case}, forward + backward", "matmul", compare(_losses(case, compile_peers), rounds))
    everything = Case(lower=0, upper=100)
    functions = {
        "matmul": peers.matmul(everything),
        "ring_info_nce": peers.with_gradient(peers.ring, everything),
        "plain MoCo": peers.with_gradient(peers.plain_moco, everything),
    }
    yield Table(f"{everything}, forward + backward", "matmul", compare(functions, rounds))

    case = Case()
    adversarial = {data: peers.with_gradient(peers.ring, Case(data=data)) for data in ("unit", "constant", "infinite")}
    yield Table(f"ring_info_nce, {case}, other data", "unit", compare(adversarial, rounds))
    samples = {
        "matmul": peers.matmul(case),
        "ring_sample": peers.sample(case),
        "ring_sample 0..100": peers.sample(everything),
    }
    yield Table(f"{case}, forward", "matmul", compare(samples, rounds))

    bank = Case(k=1_281_167)  # a memory bank of ImageNet's training images
    functions = {
        "ring_info_nce": peers.with_gradient(peers.ring, bank),
        "topk": peers.with_gradient(peers.topk, bank),
        "4096 draws, ring_sample": peers.with_gradient(peers.ring_draws, bank),
        "4096 draws, topk": peers.with_gradient(peers.topk_draws, bank),
    }
    yield Table(f"{bank}, forward + backward", "topk", compare(functions, min(rounds, 3)))


def _losses(case: Case, compile_peers: bool):
    functions = {
        "matmul": peers.matmul(case),
        "ring_info_nce": peers.with_gradient(peers.ring, case),
        "plain MoCo, all keys": peers.with_gradient(peers.plain_moco, case),
    }
    others = {"plain MoCo, all keys": peers.plain_moco, **peers.SELECTING}
    for name, loss in others.items():
        functions[name] = peers.with_gradient(loss, case)
        if compile_peers:
            functions[f"{name}, compiled"] = peers.with_gradient(peers.compiled(loss), case)
    return functions
