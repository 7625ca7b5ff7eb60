"""``python -m bench.mutual_information``: contrastive estimates of a known mutual information, as table and picture.

Where the negatives come from decides whether the estimate is a bound, how far off it is and how much it varies:
Theorems 3.1 and 3.2 of Wu et al., "Conditional Negative Sampling for Contrastive Learning of Visual Representations".
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor

from iecl_fast import ring_sample
from iecl_fast.mutual_information import CorrelatedGaussians, contrastive_information, draw_above

DIM = 8
INFORMATION = (0.5, 1.0, 2.0, 4.0, 6.0)
PAIRS, CANDIDATES, NEGATIVES, REDRAWS = 256, 16384, 1023, 8
RINGS = {
    "all (InfoNCE)": (0, 100),
    "ball 50..100": (50, 100),
    "ball 90..100": (90, 100),
    "ring 90..99": (90, 99),
    "ring 50..90": (50, 90),
    "far 0..50": (0, 50),
}
THEOREM = "e^f >= Z"


@dataclass
class Row:
    """Of one source of negatives at one mutual information: a number for each seed.

    estimate: mean over redraws of the negatives, nats. deviation: of the estimate over redraws.
    mean, variance: of e^f over negatives; under p the mean is Z = 1.
    """

    name: str
    information: float
    estimate: list[float]
    deviation: list[float]
    mean: list[float]
    variance: list[float]


def negatives(name: str, queries: Tensor, keys: Tensor) -> Tensor:
    """Scores (N, m) of negatives from a source."""
    if name == THEOREM:
        return draw_above(queries @ keys.T, 0.0, NEGATIVES)
    return ring_sample(queries, keys, *RINGS[name], num_samples=NEGATIVES)


def measure(name: str, information: float, seeds: int) -> Row:
    gaussians = CorrelatedGaussians(DIM, information)
    row = Row(name, information, [], [], [], [])
    for seed in range(seeds):
        torch.manual_seed(seed)
        x, y = gaussians.pairs(PAIRS)
        keys = gaussians.keys(torch.randn(CANDIDATES, DIM))
        queries = gaussians.queries(x)
        positives = (queries * gaussians.keys(y)).sum(dim=1)
        draws = [negatives(name, queries, keys) for _ in range(REDRAWS)]
        estimates = [contrastive_information(positives, scores).item() for scores in draws]
        weights = torch.stack(draws).double().exp()
        row.estimate.append(mean(estimates))
        row.deviation.append(stdev(estimates))
        row.mean.append(weights.mean().item())
        row.variance.append(weights.var().item())
    return row


def markdown(rows: list[Row]) -> str:
    lines = [
        "| I, nats | negatives | estimate | error | deviation of the negatives | E[e^f] / Z | Var[e^f] |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        estimate = mean(row.estimate)
        figures = (f"{mean(row.deviation):.4f}", f"{mean(row.mean):.3g}", f"{mean(row.variance):.3g}")
        error = f"{estimate - row.information:+.2f}"
        lines.append(
            f"| {row.information:g} | {row.name} | {estimate:.2f} ± {stdev(row.estimate):.2f} | {error} | "
            + " | ".join(figures)
            + " |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: list[Row], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    truth = list(INFORMATION)
    left.plot([0, truth[-1]], [0, truth[-1]], color="black", linewidth=1, label="I(X; Y)")
    left.axhline(math.log(NEGATIVES + 1), color="grey", linestyle=":", label="log(m + 1)")
    for number, name in enumerate([*RINGS, THEOREM]):
        own = [row for row in rows if row.name == name]
        style = {"color": f"C{number}", "marker": "o", "markersize": 3, "label": name}
        spread = [stdev(row.estimate) for row in own]
        left.errorbar(truth, [mean(row.estimate) for row in own], spread, capsize=2, **style)
        right.plot(truth, [mean(row.deviation) for row in own], **style)
    left.set(xlabel="true mutual information, nats", ylabel="estimate, nats", title="above the black line: no bound")
    right.set(xlabel="true mutual information, nats", yscale="log", title="deviation over redrawn negatives, nats")
    left.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.mutual_information", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="at least 2 (default: 20)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw the estimates into a PNG file")
    arguments = parser.parse_args()
    rows = [measure(name, value, arguments.seeds) for value in INFORMATION for name in [*RINGS, THEOREM]]
    print(
        f"{DIM} dimensions, {PAIRS} pairs, m = {NEGATIVES} negatives of each from {CANDIDATES} candidates, "
        f"{arguments.seeds} seeds; ± is the deviation over seeds.\n"
    )
    print(markdown(rows))
    if arguments.picture is not None:
        draw(rows, arguments.picture)


if __name__ == "__main__":
    main()
