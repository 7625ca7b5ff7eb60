"""The table of bench.ring.roofline: what kernels have to move and what they move."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """The kernels of one operator on one shape. Operations are of a kind that is counted, if there is one."""

    name: str
    shape: str
    bytes_needed: float
    bytes_moved: float
    bytes_allowed: float  # how many times what is needed, by the kernels' design
    operations: str = ""
    operations_needed: float | None = None  # or None where no least number is known
    operations_made: float | None = None
    bound: str = ""  # what bounds the kernel, by a model

    @property
    def bytes_ratio(self) -> float:
        return self.bytes_moved / self.bytes_needed


def table(rows: list[Row]) -> str:
    titles = "kernels, shape, MB needed, moved, ratio, allowed, operations, needed, made, ratio, bound (a model)"
    lines = [f"| {titles.replace(', ', ' | ')} |", "|---|---|--:|--:|--:|--:|---|--:|--:|--:|---|"]
    for row in rows:
        cells = [row.name, row.shape, f"{row.bytes_needed / 1e6:.3f}", f"{row.bytes_moved / 1e6:.3f}"]
        cells += [f"{row.bytes_ratio:.2f}", f"{row.bytes_allowed:.2f}", row.operations]
        needed, made = row.operations_needed, row.operations_made
        cells += ["" if count is None else f"{count:.3f}" for count in (needed, made)]
        cells += ["" if needed is None else f"{made / needed:.2f}", row.bound]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
