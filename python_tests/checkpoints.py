"""Checkpoints of methods that no run has trained."""

from iecl_fast.engine.checkpoint import save_checkpoint

EMPTY = {
    "config": {},
    "faults": {},
    "method": {},
    "optimizer": {},
    "precision": {},
    "rng": [None],
    "samples": 1,
    "seconds": 0.0,
    "step": 0,
    "untrained": {},
    "versions": {},
}


def write_checkpoint(path, config, method, **parts):
    """As a run's, of a `Config` and the method that was built from it; `parts` go over what else is in it."""
    save_checkpoint(path, EMPTY | {"config": config.to_dict(), "method": method.state_dict()} | parts)
