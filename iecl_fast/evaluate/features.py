"""Features of a frozen backbone, computed once, and that it is frozen."""

import itertools
from contextlib import contextmanager

import torch
from torch.utils.data import DataLoader

from iecl_fast.data import Readable
from iecl_fast.engine.errors import RunError
from iecl_fast.engine.faults import Faults
from iecl_fast.engine.signals import obey_parent_alone, postponed_to_the_end
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


@contextmanager
def unchanged(module):
    """Compare all parameters and buffers afterwards with what they were.

    Raises:
        RunError: one of them is not the same any more, to the bit (NaN is NaN).
    """
    before = {name: tensor.detach().clone() for name, tensor in _tensors(module)}
    yield module
    after = dict(_tensors(module))
    changed = [name for name in before if name not in after or not _equal(before[name], after[name])]
    if changed or len(before) != len(after):
        names = ", ".join(changed) or "there are new ones"
        raise RunError(f"the encoder was to stay frozen, but its parameters or buffers have changed: {names}")


def _tensors(module):
    return itertools.chain(module.named_parameters(), module.named_buffers())


def _equal(a, b):
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=a.is_floating_point())


def extract_features(backbone, dataset, *, fabric, batch_size, workers=0, faults=None):
    """Features and labels of a whole data set, in its order. The backbone is left as it was, statistics and all.

    Images that cannot be read are left out, as far as `faults` allows.

    With several ranks each computes a part, and all get the whole.

    Args:
        backbone: module, (N, 3, H, W) -> (N, C), on the device of `fabric`.
        dataset: items (image (3, H, W), label, ...), at least one.
        fabric: `lightning_fabric.Fabric`.
        batch_size: images of one forward pass.
        workers: processes that load images.
        faults: `Faults`, which counts and limits the unreadable images; None allows none.

    Returns:
        features: (n, C) float32, labels: (n,) int64, on the device of `fabric`; n of the images can be read.

    Raises:
        RunError: more images cannot be read than allowed, or none can; a feature is no finite number.
    """
    faults = Faults(fabric) if faults is None else faults
    rank, ranks = fabric.global_rank, fabric.world_size
    per_rank = -(-len(dataset) // ranks)
    # Every rank takes equally many: the last ones begin again at the front, and the surplus is cut off below.
    rows = [(rank * per_rank + offset) % len(dataset) for offset in range(per_rank)]
    loader = DataLoader(
        Readable(dataset, faults.max_unreadable),
        batch_size=batch_size,
        sampler=rows,
        num_workers=workers,
        generator=torch.Generator(),  # its own, so that the global random state stays as it is
    )
    features, labels, readable = [], [], []
    with frozen(backbone):
        for images, targets, *_, texts in read_batches(loader):
            features.append(backbone(images.to(fabric.device)).float())
            labels.append(targets)
            readable += [not text for text in texts]
            faults.note(texts)
    faults.agree()
    features, labels = torch.cat(features), torch.cat(labels).to(fabric.device)
    readable = torch.tensor(readable, device=fabric.device)
    features, labels, readable = (gather_rows(column)[: len(dataset)] for column in (features, labels, readable))
    if not readable.any():
        raise RunError(f"none of {len(dataset)} images can be read")
    features, labels = features[readable], labels[readable]
    if broken := int((~features.isfinite()).any(dim=1).sum()):
        raise RunError(f"the features of {broken} of {len(features)} images are no finite numbers")
    return features, labels


def read_batches(loader):
    """The batches of a DataLoader; an image that cannot be read is a RunError with one line.

    A worker process sends its whole traceback as the message, of which the last line says what was wrong.
    """
    loader.worker_init_fn = obey_parent_alone
    with postponed_to_the_end():  # half an iterator cannot be cleaned up
        batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except OSError as error:
            reason = str(error).strip().splitlines()[-1].removeprefix("OSError: ")
            raise RunError(f"an image cannot be read: {reason}") from None
        yield batch
