"""The bytes that the kernels of Ring move stay near those that they have to move."""

import sys

import pytest
from simt_build import ROOT

sys.path.append(str(ROOT))
from bench import machine_code
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
    assert {row.operations for row in counted} == {"10^6 shared atomics", "10^6 shared stores"}
    assert all(row.operations_made < 1.5 * row.operations_needed for row in counted), roofline.table(counted)


def test_table(rows):
    lines = roofline.table(rows).splitlines()
    assert len(lines) == len(rows) + 2
    assert len({line.count("|") for line in lines}) == 1


PTX = """
	ld.global.b32 	%r1, [%rd1];
	cp.async.cg.shared.global [ %r8 + 0 ], [ %rd8 + 0 ], 0x10, %r9;
$L__BB0_1:
	@%p1 ld.global.v4.b32 	{ %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
$L__BB0_2:
	wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, 0, 1, 1, 0, 0;
	cp.async.cg.shared.global [ %r8 + 0 ], [ %rd8 + 0 ], 0x10, %r9;
	ld.global.b64 	%rd1, [%rd2];
	@%p3 bra 	$L__BB0_2;
	@!%p2 bra 	$L__BB0_1;
	st.global.v2.b32 	[%rd1], {%r1, %r2};
	@%p2 bra 	$L__BB0_1;
	@%p4 bra 	$L__BB0_3;
$L__BB0_3:
	st.global.b16 	[%rd1], %rs1;
	ret;
"""
SASS = """
        /*0000*/              @!P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0010*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
        /*0020*/              @!UP1 LDG.E R2, [R4] ;
        /*0030*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0040*/                   EXIT ;
.L_x_2:
        /*0050*/                   BRA `(.L_x_2);
        /*0060*/                   NOP;
"""


def test_loops_of_machine_code():
    once, (outer, inner) = machine_code.parts(PTX)
    assert (once.loaded, once.copied, once.stored) == (4 + 16, 16, 2)
    assert (outer.loaded, outer.copied, outer.stored) == (16, 0, 8)
    assert (inner.loaded, inner.copied, inner.stored) == (16 + 8, 16, 0)
    assert [code.has_matrix_instructions for code in (once, outer, inner)] == [False, False, True]
    once, (loop,) = machine_code.parts(SASS)
    assert (once.instructions, loop.instructions) == (3, 3)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Triton calls, what they have to do, bytes that each of their loops loads in a round, and rows of the table."""
    pytest.importorskip("triton")
    from bench.ring.roofline_triton import calls, loop_bytes, row, work_of

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
        return [(call, work_of(call), loop_bytes(call), row(call)) for call in calls()]


def test_loops_load_what_they_need(launched):
    """Exactly, or as many times that as is told where a launch's work is written down."""
    for call, work, loaded, _ in launched:
        if work.loops_allowed == 1:
            assert loaded == work.round_bytes, call.launch
        else:
            needed = sum(rounds * size for rounds, size in zip(work.rounds, work.round_bytes, strict=True))
            made = sum(rounds * size for rounds, size in zip(work.rounds, loaded, strict=True))
            assert needed <= made <= work.loops_allowed * needed, call.launch


def test_passes_load_a_tile_of_keys_once(launched):
    """64 keys with 128 channels of two bytes; the last pass of plan C as many bytes of similarities."""
    loaded = {work.name: loaded for _, work, loaded, _ in launched if "bf16" in work.shape}
    for name in ("count", "collect", "weigh"):
        assert loaded[f"{name}, plan B'"] == [16384]
    assert loaded["weigh, plan C"] == [16384 + 16384]


def test_bytes_of_triton_kernels(launched):
    rows = [row for *_, row in launched]
    too_many = [row for row in rows if row.bytes_ratio > row.bytes_allowed]
    assert not too_many, roofline.table(too_many)
    assert all(row.bytes_ratio > 1 for row in rows), "what is needed is less than that"
    names = {row.name.split(",")[0] for row in rows}
    assert names >= {"product", "sample", "count", "collect", "weigh", "combine", "select", "compact", "keys_gradient"}


def test_instructions_of_triton_kernels(launched):
    """In the loops of plan B' not many more than plans.recomputes goes by."""
    rows = {row.name: row for *_, row in launched if row.operations and "tf32" not in row.shape}
    for name, told in (("count", 43), ("collect", 68), ("weigh", 80)):
        in_loops = float(rows[f"{name}, plan B'"].operations.split(", ")[1].split()[0])
        assert 0.5 * told < in_loops < 1.1 * told, name
    assert all(row.operations_made > 0 for row in rows.values())
