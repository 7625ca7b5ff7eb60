"""The comparison tables of Ring on a GPU."""

from itertools import product

import torch

from bench.device import captured
from bench.measure import Table, compare
from bench.ring import peers
from bench.ring.peers import Case

MAIN = Case(device="cuda", precision="bfloat16")
PRECISIONS = ("bfloat16", "tf32", "float32")
SHAPES = list(product((64, 256, 1024), (4096, 65536, 1_281_167), (128, 256)))
DATA = ("unit", "constant", "infinite", "near", "ties")


def tables(rounds: int, compile_peers: bool):
    """Yields tables and remarks in Markdown."""
    for precision in PRECISIONS:
        case = Case(device="cuda", precision=precision)
        yield against_others(case, rounds, compile_peers)
    yield floor(MAIN, rounds)
    for precision in PRECISIONS:
        cases = {data: Case(device="cuda", precision=precision, data=data) for data in DATA}
        functions = {data: captured(peers.with_gradient(peers.ring, case)) for data, case in cases.items()}
        yield Table(f"ring_info_nce, {precision}, other data", "unit", compare(functions, rounds, "cuda"))
    for precision, (n, k, c) in product(PRECISIONS, SHAPES):
        yield shape(Case(n=n, k=k, c=c, device="cuda", precision=precision), min(rounds, 5))


def against_others(case: Case, rounds: int, compile_peers: bool) -> Table:
    """Forward and backward of every form; "graph" is the replay of a CUDA graph."""
    losses = {"ring_info_nce": peers.ring, "plain MoCo, all keys": peers.plain_moco, **peers.SELECTING}
    functions = {"matmul": captured(peers.matmul(case))}
    for name, loss in losses.items():
        functions[name] = peers.with_gradient(loss, case)
        # quantile takes its rows in parts and kthvalue waits for the device in some releases of torch.
        if name not in ("kthvalue", "quantile"):
            functions[f"{name}, graph"] = captured(functions[name])
        # What is asked is a comparison with this one; the others take minutes to compile.
        if name == "plain MoCo, all keys" or (compile_peers and loss in peers.SELECTING.values()):
            functions[f"{name}, max-autotune"] = peers.with_gradient(peers.compiled(loss), case)
    return Table(f"{case}, forward + backward", "matmul", compare(functions, rounds, "cuda"))


def floor(case: Case, rounds: int) -> str:
    """Achieved over what this device's own rates allow, measured in the same run."""
    side = 8192
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    members = int(case.k * (case.upper - case.lower) / 100)
    functions = {
        "large product": lambda: torch.mm(a, b),
        "large copy": lambda: target.copy_(source),
        "ring_info_nce": captured(peers.with_gradient(peers.ring, case)),
        "ring_sample": captured(peers.sample(case)),
    }
    best = {name: min(result.seconds) for name, result in compare(functions, rounds, "cuda").items()}
    operations = 2 * side**3 / best["large product"]
    bytes_per_second = 2 * source.nbytes / best["large copy"]
    product_seconds = 2 * case.n * case.k * case.c / operations
    # The keys have to be read, the product be formed once for the boundaries and once for the weighted sum.
    loss_floor = max(2 * product_seconds, 2 * case.k * case.c / bytes_per_second)
    sample_floor = product_seconds + case.n * members * 2 / bytes_per_second
    lines = [
        f"{case}. Measured here: {operations / 1e12:.0f} TFLOP/s in a large product, {bytes_per_second / 1e9:.0f} GB/s "
        "in a large copy.",
        "",
    ]
    for name, least in (("ring_info_nce", loss_floor), ("ring_sample", sample_floor)):
        lines.append(f"* {name}: {best[name] * 1e6:.1f} us, {best[name] / least:.2f} times its floor")
    return "\n".join(lines) + "\n"


def shape(case: Case, rounds: int) -> Table:
    """Ring at one shape, beside the product alone and plain MoCo."""
    functions = {
        "matmul": peers.matmul(case),
        "ring_info_nce, graph": captured(peers.with_gradient(peers.ring, case)),
        "ring_info_nce": peers.with_gradient(peers.ring, case),
        "plain MoCo, all keys": peers.with_gradient(peers.plain_moco, case),
    }
    return Table(f"{case}, forward + backward", "matmul", compare(functions, rounds, "cuda"))
