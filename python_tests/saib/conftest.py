import pytest

from torch_threads import torch_threads


@pytest.fixture(autouse=True)
def one_thread():
    """Small problems gain nothing from more, and wait for each other on a busy machine."""
    with torch_threads(1):
        yield


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    pass
