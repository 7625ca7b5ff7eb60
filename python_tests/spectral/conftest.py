import pytest

from torch_threads import torch_threads


@pytest.fixture
def one_thread():
    """Small operators by the thousand: on a busy machine their threads mostly wait for each other."""
    with torch_threads(1):
        yield


@pytest.fixture
def two_threads():
    """The error of plain PyTorch, which is the measure, depends on how many threads share a sum."""
    with torch_threads(2):
        yield
