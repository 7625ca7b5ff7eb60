"""What the loops of compiled kernels do, read from PTX and SASS, and the rates of the GPU they are held against.

Rates are those of the data sheet of an H100 SXM.
"""

import re
from typing import NamedTuple

BYTES_PER_SECOND = 3.35e12
# Dense, by the type of what is multiplied.
OPERATIONS_PER_SECOND = {"bf16": 989e12, "tf32": 495e12}
# Of single threads: 67e12 operations in float32, of which a multiply-add is two and one instruction.
INSTRUCTIONS_PER_SECOND = 33.5e12

_LABEL = re.compile(r"(\$L__BB\w+|\.L_x_\w+):")
_JUMP = re.compile(r"\b(?:bra|BRA)\b.*?(\$L__BB\w+|\.L_x_\w+)")


class Code(NamedTuple):
    """Lines of a kernel that run equally often."""

    lines: list[str]

    @property
    def has_matrix_instructions(self) -> bool:
        return any("wgmma.mma_async" in line for line in self.lines)

    @property
    def copied(self) -> int:
        """Bytes that a thread copies to shared memory; of PTX."""
        copies = re.findall(r"cp\.async\.c\w\..*?, (0x\w+)", "\n".join(self.lines))
        return sum(int(size, 16) for size in copies)

    @property
    def loaded(self) -> int:
        """Bytes that a thread loads from global memory, to shared memory or to registers; of PTX."""
        return self.copied + self._accesses("ld")

    @property
    def stored(self) -> int:
        """Bytes that a thread stores to global memory where no predicate forbids it; of PTX."""
        return self._accesses("st")

    def _accesses(self, kind: str) -> int:
        accesses = re.findall(rf"\b{kind}\.global\S*?(?:\.v(\d))?\.b(\d+)", "\n".join(self.lines))
        return sum(int(vector or 1) * int(bits) // 8 for vector, bits in accesses)

    @property
    def instructions(self) -> int:
        """Of SASS, without the filling behind the end."""
        instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)", "\n".join(self.lines))
        return sum(name != "NOP" for name in instructions)


def parts(assembly: str) -> tuple[Code, list[Code]]:
    """What runs once and each loop without those within it, in their order; of PTX, or of SASS as nvdisasm prints it.

    A loop reaches from its first line to the last jump there.
    """
    lines = assembly.splitlines()
    labels = {match[1]: place for place, line in enumerate(lines) if (match := _LABEL.match(line))}
    ends: dict[int, int] = {}
    for end, line in enumerate(lines):
        match = _JUMP.search(line)
        # A jump to itself is the trap behind the end of a kernel.
        if match and labels.get(match[1], end) < end - 1:
            ends[labels[match[1]]] = end
    code: dict[int | None, list[str]] = {None: []} | {start: [] for start in sorted(ends)}
    for place, line in enumerate(lines):
        around = [start for start, end in ends.items() if start <= place <= end]
        code[max(around, default=None)].append(line)
    once, *loops = map(Code, code.values())
    return once, loops
