"""Batch norm over the images of all ranks."""

from torch import nn


def sync_batch_norm(method: nn.Module) -> None:
    """Let the BatchNorm of a method normalise over all ranks' images, as one process on the joined batch does.

    torch's SyncBatchNorm, which needs CUDA tensors. Parameters and state_dict stay as they are. What a method names in
    its ``shuffled`` keeps BatchNorm of its own: :class:`~iecl_fast.ssl.MoCo` shuffles its keys over the ranks so that
    batch statistics do not tell the positive, and statistics of all ranks together would tell it from the queue's keys,
    which come from other batches.

    Args:
        method: changed in place, before an optimiser or DistributedDataParallel takes it.
    """
    for name, module in list(method.named_children()):
        if name not in getattr(method, "shuffled", ()):
            setattr(method, name, nn.SyncBatchNorm.convert_sync_batchnorm(module))
