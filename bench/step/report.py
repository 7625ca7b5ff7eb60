"""The comparison tables of whole training steps, on the GPU where there is one."""

from bench.measure import Table, compare
from bench.step import peers


def tables(rounds: int, compile_peers: bool):
    """Yields tables; a step is a mixture of the caller's network and our parts, and is not compiled."""
    setting = peers.setting()
    for name, forms in peers.METHODS.items():
        functions = {form: peers.step(build, setting) for form, build in forms.items()}
        yield Table(f"{name}, a training step, {setting}", "plain", compare(functions, rounds, setting.device))
    functions = {"step of MoCo": peers.step(peers.moco, setting), **peers.parts_of_moco(setting)}
    yield Table(f"Parts of MoCo's step, {setting}", "step of MoCo", compare(functions, rounds, setting.device))
