import pytest


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    pass
