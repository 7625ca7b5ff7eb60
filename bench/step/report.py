"""The comparison tables of whole training steps, on the GPU where there is one."""

from bench.measure import Table, compare
from bench.step import peers


def tables(rounds: int, compile_peers: bool):
    """Yields tables; a step is a mixture of the caller's network and our parts, and is not compiled."""
    setting = peers.setting()
    for name, forms in peers.METHODS.items():
        functions = {form: peers.training(name, form, setting) for form in forms}
        yield Table(f"A training step: {name}, {setting}", "plain", compare(functions, rounds, setting.device))
    functions = {"step of MoCo": peers.training("moco", "plain", setting), **peers.parts_of_moco(setting)}
    yield Table(f"Parts of MoCo's step, {setting}", "step of MoCo", compare(functions, rounds, setting.device))
