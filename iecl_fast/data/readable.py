"""Images that cannot be read: another one is taken in their place, and what happened is said."""

import random
from typing import Any

from torch.utils.data import Dataset


class Readable(Dataset):
    """A data set's items with one entry more, a text: empty, or what was wrong with the image that was asked for.

    In place of an unreadable image comes another one, its index and label included, always the same: batches keep their
    size, and a resumed run sees what the uninterrupted one does. Of several faults, when the other one is unreadable
    too, the text has a line each. An image is unreadable when its item raises OSError.

    Args:
        dataset: items are tuples.
        limit: so many images may be unreadable in a row; one more raises its OSError.
    """

    def __init__(self, dataset: Dataset, limit: int):
        self.dataset = dataset
        self.limit = limit

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        faults, others = [], random.Random(index)
        while True:
            try:
                return (*self.dataset[index], "\n".join(faults))
            except OSError as error:
                faults.append(" ".join(str(error).split()))
                if len(faults) > self.limit:
                    raise
                index = int(others.random() * len(self.dataset))
