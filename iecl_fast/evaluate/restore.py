"""What a checkpoint has trained, as it was."""

from pathlib import Path

from iecl_fast.engine import build
from iecl_fast.engine.checkpoint import load_checkpoint, load_part
from iecl_fast.engine.config import resolve
from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.folder import RunFolder
from iecl_fast.spectral.module import SpectralNormHandle, remove_spectral_norm
from iecl_fast.ssl.encoders import ResNetBackbone


def checkpoint_path(checkpoint):
    """The file of a checkpoint that is named by itself or by its run folder."""
    path = Path(checkpoint)
    return RunFolder(path).checkpoint if path.is_dir() else path


def load_trained(path):
    """What `load_checkpoint` gives of a run's checkpoint, whose configuration has what every run's has.

    Raises:
        UsageError: it has not; what `load_checkpoint` refuses.
    """
    state = load_checkpoint(path)
    for group in ("data", "evaluate", "views"):
        if not isinstance(state["config"].get(group), dict):
            raise UsageError(f"{path} is damaged, its config has no group {group}")
    if not state["rng"]:
        raise UsageError(f"{path} is damaged, its rng is empty")
    return state


def restore_method(state, config, path):
    """The method as it was saved, on the CPU.

    Args:
        state: what `load_checkpoint` gives.
        config: `Config` whose method, ring, SAIB and encoder are the saved ones.
        path: of the checkpoint, for messages.

    Raises:
        UsageError: the weights are of another method, or no finite numbers.
    """
    # As many images on each device as in the run: SAIB may depend on it.
    ranks = len(state["rng"])
    batch_size = config.trainer.batch_size // ranks
    method = build.method(config, total_steps=1, batch_size=batch_size, num_images=state["samples"], world_size=ranks)
    load_part(method, state["method"], path)
    broken = [name for name, tensor in method.backbone.state_dict().items() if not tensor.isfinite().all()]
    if broken:
        raise UsageError(f"{path}: the encoder holds numbers that are not finite, in {', '.join(broken)}")
    return method


def plain_resnet(state, path):
    """A checkpoint's backbone as a network of its own, for others to export or to build upon, and its `Config`.

    Under spectral normalisation a weight becomes what it is divided to in evaluation, and plain. The data that the run
    was trained on need not be there: the views are all in the checkpoint.

    Args:
        state: what `load_checkpoint` gives.
        path: of the checkpoint, for messages.

    Raises:
        UsageError: the weights are of another method; its backbone is not one ResNet.
    """
    config = resolve(state["config"] | {"data": {"name": "digits"}, "evaluate": {}})
    backbone = restore_method(state, config, path).backbone
    if not isinstance(backbone, ResNetBackbone):
        raise UsageError(
            f"{path}: method.name={config.method['name']} has trained {type(backbone).__name__}, where one ResNet of "
            "three channels is needed"
        )
    if SpectralNormHandle(backbone).layers:
        remove_spectral_norm(backbone)
    return backbone.requires_grad_(True), config
