import pytest


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    pass


@pytest.fixture(scope="session")
def simt():
    """The CUDA kernels, compiled for csrc/simt."""
    import simt_ring  # needs pybind11 and a compiler, which other tests of Ring do without

    return simt_ring.module()
