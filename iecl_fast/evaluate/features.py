"""Features of a frozen backbone, computed once."""

from contextlib import contextmanager

import torch
from torch.utils.data import DataLoader

from iecl_fast.engine.errors import RunError
from iecl_fast.memory import gather_rows


@contextmanager
def frozen(module):
    """Evaluation mode without gradients; afterwards every submodule is in the mode it was in."""
    training = {submodule: submodule.training for submodule in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield module
    finally:
        for submodule, mode in training.items():
            submodule.training = mode


def extract_features(backbone, dataset, *, fabric, batch_size, workers=0):
    """Features and labels of a whole data set, in its order. The backbone is left as it was, statistics and all.

    With several ranks each computes a part, and all get the whole.

    Args:
        backbone: module, (N, 3, H, W) -> (N, C), on the device of `fabric`.
        dataset: items (image (3, H, W), label, ...), at least one.
        fabric: `lightning_fabric.Fabric`.
        batch_size: images of one forward pass.
        workers: processes that load images.

    Returns:
        features: (len(dataset), C) float32, labels: (len(dataset),) int64, on the device of `fabric`.

    Raises:
        RunError: an image cannot be read.
    """
    rank, ranks = fabric.global_rank, fabric.world_size
    per_rank = -(-len(dataset) // ranks)
    # Every rank takes equally many: the last ones begin again at the front, and the surplus is cut off below.
    rows = [(rank * per_rank + offset) % len(dataset) for offset in range(per_rank)]
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=rows,
        num_workers=workers,
        generator=torch.Generator(),  # its own, so that the global random state stays as it is
    )
    features, labels = [], []
    with frozen(backbone):
        for images, targets, *_ in read_batches(loader):
            features.append(backbone(images.to(fabric.device)).float())
            labels.append(targets)
    features, labels = torch.cat(features), torch.cat(labels).to(fabric.device)
    return gather_rows(features)[: len(dataset)], gather_rows(labels)[: len(dataset)]


def read_batches(loader):
    """The batches of a DataLoader; an image that cannot be read is a RunError with one line.

    A worker process sends its whole traceback as the message, of which the last line says what was wrong.
    """
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except OSError as error:
            raise RunError(f"an image cannot be read: {str(error).strip().splitlines()[-1]}") from None
        yield batch
