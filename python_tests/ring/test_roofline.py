"""The bytes that the kernels of Ring move stay near those that they have to move."""

import sys

import pytest
from simt_build import ROOT

sys.path.append(str(ROOT))
from bench.ring import roofline


@pytest.fixture(scope="module")
def rows():
    return roofline.cuda_rows()


def test_bytes(rows):
    too_many = [row for row in rows if row.bytes_ratio > row.bytes_allowed]
    assert not too_many, roofline.table(too_many)
    assert all(row.bytes_ratio > 0.9 for row in rows), "what is needed is less than that"


def test_operations(rows):
    """One atomic for each similarity, and few for the candidates; a store for each member."""
    counted = [row for row in rows if row.operations]
    assert {row.operations for row in counted} == {"shared atomics", "shared stores"}
    assert all(row.operations_made < 1.5 * row.operations_needed for row in counted), roofline.table(counted)


def test_table(rows):
    lines = roofline.table(rows).splitlines()
    assert len(lines) == len(rows) + 2
    assert len({line.count("|") for line in lines}) == 1
