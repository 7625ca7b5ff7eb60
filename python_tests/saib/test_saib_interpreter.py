"""SAIB's Triton kernels in Triton's interpreter."""

from pathlib import Path

import pytest
from interpreted import assert_passes_in_interpreter

pytest.importorskip("triton")


@pytest.mark.parametrize("file", ["interpreted_saib.py", "interpreted_mutants.py"])
def test_interpreted(file):
    assert_passes_in_interpreter(Path(__file__).parent / file)
