"""Several configurations, each with several seeds, and a table of what came out."""

import statistics
import sys
from pathlib import Path

from iecl_fast.engine.accuracy_picture import draw_accuracies
from iecl_fast.engine.config import merge, read_recipe, resolve
from iecl_fast.engine.curves import draw_comparison
from iecl_fast.engine.errors import RunError, UsageError
from iecl_fast.engine.folder import RunFolder, find_folder, write_json
from iecl_fast.engine.pretrain import pretrain
from iecl_fast.engine.processes import started_by_torchrun

FIGURES = ("knn_top1", "linear_top1", "knn_top1_untrained", "linear_top1_untrained", "seconds")


def sweep(names, *, seeds, output, layers=(), axis=None):
    """Train every configuration with every seed, and gather the results.

    The runs lie in ``output/<configuration>/seed<number>``. A run that is finished there is not trained again, and one
    that was stopped goes on, so the same call takes up a sweep where it was left. One that fails does not keep the
    others from being trained. ``summary.json`` and ``curves.png`` are written anew after each run.

    With an axis a configuration is trained with each of its values, is named ``<configuration>/<value>``, and
    ``accuracy.png`` shows what was reached against them.

    Args:
        names: recipes or YAML files, of different names; or a dict from labels to them.
        seeds: how many; they count on from each configuration's own.
        output: folder of the sweep.
        layers: nested mappings over every configuration.
        axis: `Axis`, or None.

    Returns:
        (dict from configuration to dict from figure to the list of its values, failed runs as "folder: reason").

    Raises:
        UsageError: a configuration is not allowed, two have one name, or a folder holds something else: another
            configuration's run, a damaged one. Nothing is trained then.
        Interrupted: a signal came; what is done is kept.
    """
    if seeds < 1:
        raise UsageError(f"--seeds: {seeds} is not allowed, it must be at least 1")
    if started_by_torchrun():
        raise UsageError("a sweep's runs follow each other in one process: start it without torchrun")
    runs, places = {}, {}
    for line, name in (names if isinstance(names, dict) else _by_stem(names)).items():
        for value in (None,) if axis is None else axis.values:
            label, own = (line, ()) if axis is None else (f"{line}/{value}", (axis.layer(value),))
            runs[label] = _runs_of(name, seeds, Path(output) / label, (*layers, *own))
            places[label] = (line, value)
    _check_folder(Path(output), runs)
    for config in (config for configs in runs.values() for config in configs):
        if RunFolder(config.output).config.exists():
            find_folder(config, config.output)
    results, failures = {label: [] for label in runs}, []
    for label, configs in runs.items():
        for config in configs:
            folder = RunFolder(config.output)
            print(f"{label}, seed {config.seed}: {folder.path}", file=sys.stderr, flush=True)
            try:
                _, result = pretrain(config, resume=config.output if folder.config.exists() else None)
            except (RunError, UsageError) as error:
                failures.append(f"{folder.path}: {error}")
                continue
            results[label].append(result)
            summary = {label: _figures(done) for label, done in results.items() if done}
            write_json(Path(output) / "summary.json", summary)
            finished = {label: [RunFolder(c.output).metrics for c in configs] for label, configs in runs.items()}
            finished = {label: [path for path in paths if path.exists()] for label, paths in finished.items()}
            draw_comparison(finished, Path(output) / "curves.png", "mean over the seeds")
            if axis is not None:
                lines = {line: {} for line, _ in places.values()}
                for label, figures in summary.items():
                    line, value = places[label]
                    lines[line][value] = figures
                lines = {line: found for line, found in lines.items() if found}
                draw_accuracies(lines, Path(output) / "accuracy.png", key=axis.key, values=axis.values)
    return {label: _figures(done) for label, done in results.items()}, failures


def _by_stem(names):
    """The configurations, labelled by the names of their files."""
    labelled = {}
    for name in names:
        label = Path(name).stem
        if label in labelled:
            raise UsageError(f"two configurations are named {label}: their runs would share a folder")
        labelled[label] = name
    return labelled


def _check_folder(folder, labels):
    """Refuse a folder that holds something, and nothing of a sweep: its files would mix with the runs."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not any((folder / name).exists() for name in ("summary.json", *labels)):
        raise UsageError(f"{folder} exists already and is no sweep's: name another folder with --output")


def _runs_of(name, seeds, folder, layers):
    """The configurations of one recipe's runs."""
    mapping = read_recipe(name)
    for layer in layers:
        mapping = merge(mapping, layer)
    configs = []
    for number in range(seeds):
        seed = resolve(mapping).seed + number
        config = resolve(merge(mapping, {"seed": seed, "output": str(folder / f"seed{seed}")}))
        if config.trainer.devices not in (None, 1):
            raise UsageError(
                f"trainer.devices: {config.trainer.devices} in {name} is not allowed in a sweep, whose runs follow "
                "each other in one process: write trainer.devices=1"
            )
        configs.append(config)
    return configs


def _figures(results):
    return {figure: [result[figure] for result in results] for figure in FIGURES}


def format_table(results):
    """The results of :func:`sweep` as text: a line for each configuration, mean and deviation over its seeds.

    The deviation is that of a sample, with one less than the number of seeds.
    """
    lines = [["", "runs", "kNN", "linear probe", "kNN untrained", "linear untrained", "seconds"]]
    for label, figures in results.items():
        percent = [spread(figures[name], 100, " %") for name in FIGURES[:-1]]
        lines.append([label, str(len(figures["seconds"])), *percent, spread(figures["seconds"], 1, "")])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(cell.ljust(width) if place == 0 else cell.rjust(width) for place, (cell, width) in enumerate(row))
        for row in (list(zip(line, widths)) for line in lines)
    )


def spread(values, scale, unit):
    """``"60.0 ± 14.1 %"``: mean and deviation of `scale` times the values, or ``"-"`` where there are none."""
    if not values:
        return "-"
    mean = f"{scale * statistics.mean(values):.1f}"
    deviation = f" ± {scale * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean}{deviation}{unit}"
