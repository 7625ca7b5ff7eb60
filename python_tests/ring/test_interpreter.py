"""Ring's Triton kernels in Triton's interpreter."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from interpreted import assert_passes_in_interpreter

HERE = Path(__file__).parent


@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("interpreted_*.py")))
def test_interpreted(file):
    assert_passes_in_interpreter(HERE / file)
