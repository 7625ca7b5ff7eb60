import pytest
import torch
from hypothesis import HealthCheck, settings

# A busy machine may take any time for one example; the examples are the same in every run.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("steady")


@pytest.fixture
def poisoned_memory():
    """Fresh tensors hold NaN, so that a cell which no kernel wrote fails the test."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
