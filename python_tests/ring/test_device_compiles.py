"""The CUDA kernels of csrc/ring compile for every architecture, without spills and within its limits.

That offsets have 64 bits is shown by running the kernels on elements that lie far apart: test_offsets_of_64_bits.
"""

import nvcc
import pytest


@nvcc.needed
@pytest.mark.parametrize(
    ("source", "count", "threads"), [("select", 6, 512), ("compact", 3, 512), ("gradient", 7, 256)]
)
def test_compiles_without_spills(source, count, threads):
    nvcc.assert_fits(f"ring/{source}_cuda.cu", count, threads)
