"""The processes of a run: Lightning Fabric places the model, sets the precision, and synchronises ranks."""

from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from lightning_fabric.strategies import DDPStrategy

from iecl_fast.engine import build
from iecl_fast.engine.errors import UsageError


def launch_fabric(trainer):
    """A launched Fabric; what it refuses is a UsageError."""
    try:
        fabric = Fabric(
            accelerator=build.accelerator(trainer),
            devices=trainer.devices,
            # The methods keep their buffers alike on all ranks themselves.
            strategy="auto" if trainer.devices == 1 else DDPStrategy(broadcast_buffers=False),
            **_precision(trainer),
        )
    except (ValueError, RuntimeError, ImportError) as error:
        raise UsageError(f"trainer: {' '.join(str(error).split())}") from None
    fabric.launch()
    if trainer.batch_size % fabric.world_size or trainer.batch_size < 2 * fabric.world_size:
        raise UsageError(
            f"trainer.batch_size: {trainer.batch_size} is not allowed, it must be a multiple of the number of devices, "
            f"{fabric.world_size}, and give each at least 2 images (batch norm)"
        )
    return fabric


def _precision(trainer):
    """Fabric's argument for the precision. By name it would take bfloat16 for float16 on a CPU, with a warning."""
    if trainer.precision == "16-mixed":
        return {"plugins": MixedPrecision("16-mixed", build.accelerator(trainer))}
    return {"precision": trainer.precision}


def on_rank_zero(fabric, action):
    """What `action()` returns on rank 0, given to every rank; its UsageError or OSError is raised on every rank."""
    outcome = None
    if fabric.is_global_zero:
        try:
            outcome = action()
        except (UsageError, OSError) as error:
            outcome = error
    outcome = fabric.broadcast(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
