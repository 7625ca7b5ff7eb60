"""Tests of the tests: each deliberate mistake in the kernels is found, and without it the same check passes."""

import mutants
import pytest
from mutants import MUTANTS


@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=lambda number: MUTANTS[number].name)
def test_mistakes_are_found(number):
    assert mutants.passes(MUTANTS[number], -1)
    assert not mutants.passes(MUTANTS[number], number)
