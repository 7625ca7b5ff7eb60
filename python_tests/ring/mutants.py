"""Deliberate mistakes in the kernels of csrc/ring, each to be found by the checks that the kernels pass.

All are compiled into one module and chosen at run time: every mistake becomes `mutant == 3 ? mistake : original`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import device_checks as checks
import simt_ring
import torch
from simt_build import CSRC, ROOT
from simt_ring import Kernels

Check = Callable[[Kernels], None]


@dataclass(frozen=True)
class Mutant:
    """``original`` is an expression, or one or more statements; together with what comes before it it occurs once."""

    name: str
    file: str
    original: str
    mistake: str
    check: Check
    splits: int = 1
    before: str = ""

    def __str__(self) -> str:
        return self.name

    def selected(self, number: int) -> str:
        if self.original.endswith(";"):
            return f"if (mutant == {number}) {{ {self.mistake} }} else {{ {self.original} }}"
        return f"(mutant == {number} ? ({self.mistake}) : ({self.original}))"


def select(kind: str, k: int = 3001) -> Check:
    return lambda kernels: checks.check_select(kernels, kind, k)


def candidates(kind: str) -> Check:
    return lambda kernels: checks.check_select_candidates(kernels, kind)


def compact(kind: str, k: int = 5001) -> Check:
    return lambda kernels: checks.check_compact(kernels, kind, k)


def draw(kernels: Kernels) -> None:
    checks.check_draw(kernels, "ties", 300)


def query_gradient(kernels: Kernels) -> None:
    checks.check_query_gradient(kernels, torch.float16, 1500, 140, "contiguous")


def keys_gradient(kernels: Kernels) -> None:
    checks.check_keys_gradient(kernels, torch.float32, 600, 40, True)


ORDER, SOURCES, LADDER, SELECT, COMPACT, GRADIENT = (
    f"{stem}.cuh" for stem in ("order", "sources", "ladder", "select", "compact", "gradient")
)
MUTANTS = (
    Mutant("NaN by its bits", ORDER, "similarity != similarity", "false", select("nan")),
    Mutant("-0 below 0", ORDER, "similarity + 0.0f", "similarity", select("signed zeros")),
    Mutant("first member left out", COMPACT, "lower <= at", "lower < at", compact("ties")),
    Mutant("one member too many", COMPACT, "at < upper", "at <= upper", compact("unit")),
    Mutant("ties by chance", ORDER, "index", "0u", compact("ties"), before="<< 32 | "),
    Mutant("excluded key kept", COMPACT, "excluded - index < 4", "false", compact("unit")),
    Mutant("ties as members", COMPACT, "low < values[i] && values[i] < high", "low <= values[i]", compact("unit")),
    Mutant("ties by value alone", COMPACT, "(members | others) != 15", "false", compact("ties")),
    Mutant("sum includes the own value", ORDER, "before + sum - value", "before + sum", compact("unit")),
    Mutant(
        "no barrier before the sums of warps are read",
        ORDER,
        "__syncthreads();",
        "",
        compact("unit"),
        before="of_warps[warp] = sum;\n  ",
    ),
    Mutant(
        "ties in descending index",
        SOURCES,
        "at + element",
        "mask == 15 ? at + 3 - element : at + element",
        select("ties", 3000),
    ),
    Mutant(
        "a candidate beyond the end", SOURCES, "begin + 32 * i < size", "begin + 32 * i <= size", candidates("unit")
    ),
    Mutant(
        "counts of segments are trusted",
        SOURCES,
        "min(int64_t(counts[segment]), capacity)",
        "int64_t(counts[segment])",
        checks.check_bad_candidates,
    ),
    Mutant("elements before the piece", SOURCES, "at + i >= lead && at + i < end", "at + i < end", compact("unit"), 3),
    Mutant("vectors before the piece", SOURCES, "4 * first >= lead", "true", compact("unit")),
    Mutant(
        "vectors beyond the piece",
        SOURCES,
        "4 * (first + (vectors - 1) * kThreads) + 4 <= end",
        "4 * (first + (vectors - 1) * kThreads) < end",
        compact("unit", 3001),
    ),
    Mutant(
        "32-bit offset of a row",
        SELECT,
        "row * similarities.row_stride",
        "int(row) * int(similarities.row_stride)",
        checks.check_offsets,
    ),
    Mutant(
        "32-bit offset of a key", SOURCES, "int64_t(at + i) * stride", "int(at + i) * int(stride)", checks.check_offsets
    ),
    Mutant(
        "rank too high",
        LADDER,
        "found[t].rank",
        "found[t].rank + (found[t].rank + 1 < found[t].count)",
        select("ties"),
        before="target.rank = ",
    ),
    Mutant(
        "infinities in each other's place",
        SELECT,
        "value > 0.0f ? kInfinity : value < 0.0f ? kBelowRange : kNotANumber",
        "value > 0.0f ? kBelowRange : value < 0.0f ? kInfinity : kNotANumber",
        select("few infinite"),
    ),
    Mutant("four equal ones count three", LADDER, "4u", "3u", select("constant"), before="bins[0], origin), "),
    Mutant("old counts", LADDER, "make_uint4(0, 0, 0, 0)", "vectors[i]", select("unit")),
    Mutant(
        "no barrier after clearing the counts",
        LADDER,
        "__syncthreads();",
        "",
        select("unit"),
        before="vectors[i] = make_uint4(0, 0, 0, 0);\n  ",
    ),
    Mutant(
        "no barrier before the counts are read",
        LADDER,
        "__syncthreads();",
        "",
        select("unit"),
        before="Found (&found)[2]) {\n  ",
    ),
    Mutant(
        "excluded key counted",
        SELECT,
        "first <= source.excluded && source.excluded <= last",
        "false",
        select("ties"),
    ),
    Mutant(
        "excluded key collected",
        SELECT,
        "of[i] >= 0 && source.excludes(i, index)",
        "false",
        select("constant", 700),
        before="== first ? 0 : 1;\n      if (",
    ),
    Mutant(
        "ranks in one bin as if in two",
        LADDER,
        "same ? targets[1].rank : targets[0].count + targets[1].rank",
        "targets[0].count + targets[1].rank",
        select("constant"),
    ),
    Mutant(
        "digits that overlap",
        LADDER,
        "32 - __clz(int(width())) - kDigitBits",
        "31 - __clz(int(width())) - kDigitBits",
        select("unit"),
    ),
    Mutant("a digit's end too low", LADDER, "(1u << shifts[t]) - 1", "(1u << shifts[t]) / 2", select("constant")),
    Mutant("segments overflow", SELECT, "longest > kMaxCollected", "false", select("constant"), 2),
    Mutant(
        "ranks among the candidates of two bins",
        SELECT,
        "same ? 0 : found[0].count",
        "0",
        select("unit"),
        2,
        before="found[1].rank + (",
    ),
    Mutant(
        "no barrier before members are written out",
        COMPACT,
        "__syncthreads();",
        "",
        compact("unit"),
        before="+ element);\n      }\n    }\n    ",
    ),
    Mutant("places of the second vectors", COMPACT, "totals >> 16 * i & 0xffff", "0", compact("unit")),
    Mutant("splits begin too late", COMPACT, "split < piece.split", "split <= piece.split", compact("unit"), 3),
    Mutant(
        "one more than there is room for",
        COMPACT,
        "written + slot >= results.size",
        "written + slot > results.size",
        checks.check_room,
    ),
    Mutant(
        "draws from the ring of other rows",
        COMPACT,
        "rest ? ranks.rest[1] - ranks.rest[0] : ranks.all[1] - ranks.all[0]",
        "ranks.all[1] - ranks.all[0]",
        draw,
    ),
    Mutant("draws rounded", COMPACT, "uniform[draw] * double(size)", "uniform[draw] * double(size) + 0.5", draw),
    Mutant(
        "no barrier before the sums of warps are added",
        GRADIENT,
        "__syncthreads();",
        "",
        query_gradient,
        before="= sum[i];\n  ",
    ),
    Mutant("last part left out", GRADIENT, "split < splits", "split + 1 < splits", query_gradient),
    Mutant("places of other keys", GRADIENT, "sorted[middle] < value", "sorted[middle] <= value", keys_gradient),
    Mutant("warps add the same", GRADIENT, "bounds[key] + warp", "bounds[key]", keys_gradient),
    Mutant("place as a row", GRADIENT, "place / samples", "place % query.rows", keys_gradient),
)


@cache
def module():
    """All mutants, chosen by ``set_mutant``; -1 for none."""
    folder = ROOT / "build" / "mutants" / "csrc"
    (folder / "ring").mkdir(parents=True, exist_ok=True)
    for path in sorted((CSRC / "ring").glob("*.cu*")):
        text = path.read_text()
        if path.suffix == ".cuh":
            text = "extern int mutant;\n" + _with_mistakes(path.name, text)
        changed = folder / "ring" / path.name
        if not changed.exists() or changed.read_text() != text:  # another process may be compiling them
            changed.write_text(text)
    return simt_ring.build("simt_ring_mutants", changed=folder)


def _with_mistakes(file: str, text: str) -> str:
    changes = []
    for number, mutant in enumerate(MUTANTS):
        if mutant.file != file:
            continue
        whole = mutant.before + mutant.original
        if text.count(whole) != 1:
            raise ValueError(f"{mutant.name}: {whole!r} occurs {text.count(whole)} times in {file}")
        changes.append((text.index(whole) + len(mutant.before), len(mutant.original), mutant.selected(number)))
    for begin, length, selected in sorted(changes, reverse=True):  # from the end, so that places stay what they are
        text = text[:begin] + selected + text[begin + length :]
    return text


def passes(mutant: Mutant, number: int) -> bool:
    """Whether the mutant's check finds nothing wrong; with number = -1 it is no mutant."""
    torch.manual_seed(0)
    module().set_mutant(number)
    module().set_seed(1)
    try:
        mutant.check(Kernels(module(), mutant.splits))
    except (AssertionError, RuntimeError):
        return False
    finally:
        module().set_mutant(-1)
    return True
