"""``iecl-fast evaluate``."""

from iecl_fast.commands import dense
from iecl_fast.commands.words import Parser, check_torchvision, place
from iecl_fast.engine.errors import UsageError
from iecl_fast.evaluate.accuracy import percent

DESCRIPTION = """\
Measure the encoder of a checkpoint: its frozen features by their nearest neighbours or by a linear classifier, or what
the whole network learns when it is trained on from there, as a classifier, a detector or a segmenter.
"""

EXAMPLES = """\
examples:
  iecl-fast evaluate knn --checkpoint runs/first
  iecl-fast evaluate knn --checkpoint runs/first evaluate.knn_k=20
  iecl-fast evaluate linear --checkpoint runs/first/checkpoints/last.ckpt --data cifar10 --output runs/first-on-cifar10
  iecl-fast evaluate linear --checkpoint runs/first evaluate.linear=iecl              a paper's protocol: iecl or ring
  iecl-fast evaluate linear --checkpoint runs/first --data dtd --data flowers102 --data photos     a table of several
  iecl-fast evaluate finetune --checkpoint runs/first evaluate.labels=0.1             with a tenth of the labels

OUTPUT holds result.json with the accuracy of each class, confusion.png and, for several data sets, table.md.
"""


def parser():
    command = Parser(prog="iecl-fast evaluate", description=DESCRIPTION, epilog=f"{EXAMPLES}\n{dense.help_text()}")
    command.add_argument("protocol", choices=("linear", "knn", "finetune", *dense.TASKS), help="how to measure")
    command.add_argument("--checkpoint", required=True, type=place, metavar="FILE|DIR", help="checkpoint or run folder")
    command.add_argument(
        "--data",
        action="append",
        type=place,
        default=[],
        metavar="NAME|FOLDER",
        help="measure on other data than the run's; may be given several times, for detect and segment once",
    )
    command.add_argument("--output", type=place, metavar="DIR", help="folder for what is found (default: only print)")
    command.add_argument("--freeze", action="store_true", help="detect, segment: leave the backbone as it is")
    words = "values over the run's configuration; linear, knn, finetune: the keys of iecl-fast pretrain --help"
    command.add_argument("overrides", nargs="*", metavar="key.sub=value", help=words)
    return command


def run(arguments):
    if arguments.protocol in dense.TASKS:
        return dense.run(arguments)
    if arguments.freeze:
        raise UsageError(f"--freeze belongs to {' and '.join(dense.TASKS)}, {arguments.protocol} has its own way")
    check_torchvision()
    from iecl_fast.engine.config import override
    from iecl_fast.evaluate.from_checkpoint import evaluate_checkpoint
    from iecl_fast.evaluate.results import check_output, format_table, write_results

    overrides = override({}, arguments.overrides)
    folder = None if arguments.output is None else check_output(arguments.output)
    evaluations = evaluate_checkpoint(
        arguments.protocol, arguments.checkpoint, data=arguments.data, overrides=overrides
    )
    if folder is not None:
        write_results(folder, evaluations)
    if len(evaluations) > 1:
        print(format_table(evaluations))
        return
    for name, value in evaluations[0].summary.items():
        print(f"{name:22} {_words(name, value)}")


def _words(name, value):
    if isinstance(value, list):  # mean and deviation
        return " ".join(f"{number:.4f}" for number in value)
    return percent(value) if "_top" in name else value
