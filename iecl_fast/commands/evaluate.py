"""``iecl-fast evaluate``."""

from pathlib import Path

from iecl_fast.commands import dense
from iecl_fast.commands.words import Parser, check_torchvision, percent
from iecl_fast.engine.errors import UsageError

DESCRIPTION = """\
Measure the frozen encoder of a checkpoint: by a linear classifier on its features, or by its nearest neighbours. Or
train a detector or a segmenter around it and measure that.
"""

EXAMPLES = """\
examples:
  iecl-fast evaluate knn --checkpoint runs/first
  iecl-fast evaluate linear --checkpoint runs/first/checkpoints/last.ckpt --data cifar10 --output runs/first-on-cifar10
  iecl-fast evaluate knn --checkpoint runs/first evaluate.knn_k=20
"""


def parser():
    command = Parser(prog="iecl-fast evaluate", description=DESCRIPTION, epilog=f"{EXAMPLES}\n{dense.help_text()}")
    command.add_argument("protocol", choices=("linear", "knn", *dense.TASKS), help="how to measure")
    command.add_argument("--checkpoint", required=True, metavar="FILE|DIR", help="checkpoint or run folder")
    command.add_argument("--data", metavar="NAME|FOLDER", help="measure on other data than the run's")
    command.add_argument("--output", metavar="DIR", help="folder for result.json (default: only print)")
    command.add_argument("--freeze", action="store_true", help="detect, segment: leave the backbone as it is")
    command.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values over the run's configuration")
    return command


def run(arguments):
    if arguments.protocol in dense.TASKS:
        return dense.run(arguments)
    if arguments.freeze:
        raise UsageError(f"--freeze belongs to {' and '.join(dense.TASKS)}, {arguments.protocol} has its own way")
    check_torchvision()
    from iecl_fast.engine.config import merge, parse_override
    from iecl_fast.engine.folder import write_json
    from iecl_fast.evaluate.from_checkpoint import evaluate_checkpoint

    overrides = {} if arguments.data is None else {"data": {"name": arguments.data, "limit": None}}
    for layer in map(parse_override, arguments.overrides):
        overrides = merge(overrides, layer)
    target = None if arguments.output is None else Path(arguments.output) / "result.json"
    if target is not None and target.exists():
        raise UsageError(f"{target} exists already and is not overwritten: name another folder with --output")
    result = evaluate_checkpoint(arguments.protocol, arguments.checkpoint, overrides=overrides)
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_json(target, result)
    for name, value in result.items():
        print(f"{name:18} {percent(value) if '_top' in name else value}")
