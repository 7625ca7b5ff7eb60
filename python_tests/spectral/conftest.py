import pytest
import torch


@pytest.fixture
def one_thread():
    """Small operators by the thousand: on a busy machine their threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
