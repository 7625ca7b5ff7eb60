import pytest
import torch


@pytest.fixture
def one_thread():
    """Small operators by the thousand: on a busy machine their threads mostly wait for each other."""
    yield from _with_threads(1)


@pytest.fixture
def two_threads():
    """The error of plain PyTorch, which is the measure, depends on how many threads share a sum."""
    yield from _with_threads(2)


def _with_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)
