import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Small problems gain nothing from more, and wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    pass
