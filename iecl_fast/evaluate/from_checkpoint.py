"""Measure the encoder of a checkpoint, on the data it was trained on or on other."""

from pathlib import Path

from lightning_fabric import Fabric

from iecl_fast.engine import build
from iecl_fast.engine.checkpoint import load_checkpoint, load_part
from iecl_fast.engine.config import merge, resolve
from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.folder import RunFolder
from iecl_fast.evaluate.protocols import measure


def evaluate_checkpoint(protocol, checkpoint, *, overrides=None):
    """Accuracy of a checkpoint's backbone.

    Args:
        protocol: a name from `PROTOCOLS`.
        checkpoint: a checkpoint file, or a run folder.
        overrides: nested mapping over the run's configuration, for example other data or another k.

    Returns:
        dict: "checkpoint", "data", "step", and what `measure` gives.

    Raises:
        UsageError: no checkpoint, a damaged one, or data that is not there.
    """
    path = Path(checkpoint)
    if path.is_dir():
        path = RunFolder(path).checkpoint
    state = load_checkpoint(path)
    config = resolve(merge(state["config"], overrides or {}))
    for group in ("method", "ring", "saib", "encoder"):
        if config.to_dict()[group] != state["config"][group]:
            raise UsageError(f"{group}: the checkpoint's encoder is as it is, {group} cannot be changed here")
    fabric = Fabric(accelerator=build.accelerator(config.trainer), devices=1)
    # As many images on each device as in the run: SAIB may depend on it.
    ranks = len(state["rng"])
    batch_size = config.trainer.batch_size // ranks
    method = build.method(config, total_steps=1, batch_size=batch_size, num_images=state["samples"], world_size=ranks)
    load_part(method, state["method"], path)
    backbone = method.backbone.to(fabric.device)
    train, test, num_classes = build.evaluation_data(config)
    with build.threads(config.trainer):
        accuracies = measure(
            backbone,
            train,
            test,
            num_classes,
            (protocol,),
            options=config.evaluate,
            fabric=fabric,
            workers=config.data.workers,
            probe_views=build.probe_views(config),
        )
    return {"checkpoint": str(path), "data": config.data.name, "step": state["step"], **accuracies}
