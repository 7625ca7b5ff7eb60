"""What the processes of a run tell one another in a step, counted beforehand."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from iecl_fast.ssl import CMC, InstanceDiscrimination, MoCo, SimCLR

FLOAT, INDEX = 4, 8  # bytes of a float32, of an int64


def bytes_received(config, method, *, images_per_pass, world_size):
    """Bytes that each process gets from the others in one optimiser step, by what they are for.

    Counted are the rows of all gathers, ``world_size - 1`` parts of each, and of the sums over processes what a ring
    needs, ``2 (world_size - 1) / world_size`` of the summed tensor, in a step that computes all terms of the loss. Not
    counted: the few bytes that tell sizes, the losses at logged steps, SyncBatchNorm's statistics, and local
    aggregation's clusters.

    Args:
        config: `Config`.
        method: as `build.method` makes it.
        images_per_pass: on each device.
        world_size: devices.

    Returns:
        dict of ints: ``gradients``; ``keys``, into the queue or bank, None for a sharded one, where it depends on what
        the keys are; ``shuffle``, of the images and keys whose batch
        norm is shuffled; ``embeddings``, with their gradients, for losses of the joined batch.
    """
    passes = config.trainer.accumulate
    rows = passes * images_per_pass * (world_size - 1)  # the others' images
    dim = config.method["dim"] * FLOAT
    halves = 2 if config.method.get("symmetric") else 1
    if config.method.get("sharded"):
        keys = None
    elif isinstance(method, MoCo):
        keys = halves * rows * dim
    elif isinstance(method, InstanceDiscrimination | CMC):
        normalizer = FLOAT if config.method.get("loss") == "nce" else 0
        keys = rows * (dim + INDEX + normalizer) * (2 if isinstance(method, CMC) else 1)
    else:
        keys = 0
    image = 3 * config.views["image_size"] ** 2 * FLOAT
    trained = sum(p.numel() for p in method.parameters() if p.requires_grad) * FLOAT
    forth, back = _gathered(method, halves)
    return {
        "gradients": round(trained * 2 * (world_size - 1) / world_size),
        "keys": keys,
        "shuffle": halves * rows * (image + dim) if _shuffles(method) else 0,
        # Forth as rows, and back as the sum of all processes' gradients.
        "embeddings": (forth + 2 * back) * rows * dim,
    }


def _shuffles(method):
    norms = [m for name in getattr(method, "shuffled", ()) for m in getattr(method, name).modules()]
    return any(isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm) for m in norms)


def _gathered(method, halves):
    """How many embeddings of each image the losses gather, and of how many the gradients come back."""
    own = 2 if isinstance(method, SimCLR) else 0
    terms = getattr(method, "terms", None)
    if terms is None or not terms.active:
        return own, own
    if not isinstance(method, MoCo | SimCLR):
        halves = 2  # the others' losses are symmetric
    anchors = halves * (terms.kl_weight > 0)
    return own + halves + anchors, own + halves * (terms.entropy_weight > 0) + anchors
