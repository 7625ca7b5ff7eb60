"""The command line: ``iecl-fast pretrain``, ``iecl-fast evaluate linear|knn``, ``iecl-fast doctor``.

Exit status: 0 the work was done; 1 it failed; 2 it was not understood or cannot be done as asked; 130 and 143
interrupted by SIGINT and SIGTERM. What a user can cause is one message on standard error, never a traceback.
"""

import argparse
import os
import re
import sys
import textwrap
from pathlib import Path

from iecl_fast import __version__
from iecl_fast.engine.errors import Interrupted, RunError, UsageError
from iecl_fast.engine.schema import did_you_mean

DESCRIPTION = """\
Contrastive pretraining of image encoders, with Ring negatives.

  iecl-fast pretrain              train an encoder on handwritten digits: two minutes, no download
  iecl-fast evaluate knn --checkpoint runs/NAME
  iecl-fast sweep cifar10_moco_v2 iecl_cifar10 --seeds 3      several recipes and seeds, and a table
  iecl-fast doctor                what was built, and what is used

Each of them explains itself: iecl-fast pretrain --help
"""

PRETRAIN_DESCRIPTION = """\
Train an encoder without labels, then measure its features by kNN and by a linear classifier, before and after.

Without arguments: IE-CL with Ring negatives on scikit-learn's handwritten digits, two minutes on two cores.
"""

PRETRAIN_EXAMPLES = """\
examples:
  iecl-fast pretrain                                          the digits
  iecl-fast pretrain --epochs 5 --output runs/first           shorter, in a folder of your choice
  iecl-fast pretrain --config cifar10_moco_ring data.download=true
  iecl-fast pretrain --data photos                            your own: photos/train/<class>/ and photos/test/<class>/
  iecl-fast pretrain --data photos encoder.width=64 trainer.threads=null      the same with a wider network, all cores
  iecl-fast pretrain method.temperature=0.1 ring.upper=95     any value of the configuration
  iecl-fast pretrain ring=null saib=null                      all keys are negatives, no block transforms a view
  iecl-fast pretrain --method byol                            another method, with what of the recipe it takes
  iecl-fast pretrain --resume runs/first                      go on with a run that was stopped

recipes for --config (or a YAML file of yours with the same keys):
  {recipes}

a run folder holds:
  config.yaml             every value that was used
  environment.json        versions and hardware
  metrics.csv             losses and the like over the steps; as a picture curves.png, for TensorBoard tensorboard/
  views.png               what SAIB makes of some views
  checkpoints/last.ckpt   to resume and to evaluate
  result.json             the accuracies, before and after

keys and their values in this recipe:
{keys}
"""

SWEEP_DESCRIPTION = """\
Train several recipes with several seeds, one after the other, and print mean and deviation of what they reach.
"""

SWEEP_EXAMPLES = """\
examples:
  iecl-fast sweep digits digits_moco --seeds 3
  iecl-fast sweep iecl_cifar10 mine.yaml --seeds 3 --output runs/comparison data.limit=10000 trainer.epochs=20

The runs lie in OUTPUT/<recipe>/seed<number>. Called again it goes on where it was stopped, and what is finished is only
read; nothing is overwritten. Beside them: summary.json, and curves.png with a curve for each recipe.
"""

EVALUATE_DESCRIPTION = """\
Measure the frozen encoder of a checkpoint: by a linear classifier on its features, or by its nearest neighbours.
"""

EVALUATE_EXAMPLES = """\
examples:
  iecl-fast evaluate knn --checkpoint runs/first
  iecl-fast evaluate linear --checkpoint runs/first/checkpoints/last.ckpt --data cifar10 --output runs/first-on-cifar10
  iecl-fast evaluate knn --checkpoint runs/first evaluate.knn_k=20
"""


class Parser(argparse.ArgumentParser):
    """Prints text as it is laid out, and adds the nearest spelling to what it does not know."""

    def __init__(self, **options):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message):
        unknown = re.search(r"unrecognized arguments: ([^\s=]+)|invalid choice: '([^']*)'", message)
        if unknown:
            choices = [choice for action in self._actions for choice in action.choices or ()]
            message += did_you_mean(unknown[1] or unknown[2], [*self._option_string_actions, *choices])
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n")


class PretrainParser(Parser):
    """Lists recipes and keys in its help; they are looked up only when it is asked for."""

    def format_help(self):
        from iecl_fast.engine.config import describe_keys, recipes

        keys = "".join(f"  {line}\n" for line in describe_keys())
        names = textwrap.fill("  ".join(recipes()), 116, subsequent_indent="  ", break_on_hyphens=False)
        self.epilog = PRETRAIN_EXAMPLES.format(recipes=names, keys=keys)
        return super().format_help()


def pretrain_parser():
    parser = PretrainParser(prog="iecl-fast pretrain", description=PRETRAIN_DESCRIPTION)
    parser.add_argument("--config", metavar="FILE", help="YAML file, or the name of a recipe (default: digits)")
    parser.add_argument("--method", metavar="NAME", help="method.name, with its own defaults")
    parser.add_argument("--data", metavar="NAME|FOLDER", help="digits, cifar10, cifar100, stl10, imagenet, or a folder")
    parser.add_argument("--epochs", type=int, metavar="N", help="trainer.epochs")
    parser.add_argument("--batch-size", type=int, metavar="N", help="trainer.batch_size")
    parser.add_argument("--seed", type=int, metavar="N", help="of weights, order and augmentations")
    parser.add_argument("--output", metavar="DIR", help="run folder, a new one (default: runs/<method>-<data>-<time>)")
    parser.add_argument("--resume", metavar="DIR", help="run folder to go on with, from its last checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="any value of the configuration")
    return parser


def evaluate_parser():
    parser = Parser(prog="iecl-fast evaluate", description=EVALUATE_DESCRIPTION, epilog=EVALUATE_EXAMPLES)
    parser.add_argument("protocol", choices=("linear", "knn"), help="how to measure")
    parser.add_argument("--checkpoint", required=True, metavar="FILE|DIR", help="checkpoint or run folder")
    parser.add_argument("--data", metavar="NAME|FOLDER", help="measure on other data than the run's")
    parser.add_argument("--output", metavar="DIR", help="folder for result.json (default: only print)")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values over the run's configuration")
    return parser


def _check_torchvision():
    """A torchvision of another torch fails in the middle of its own import, in words that help nobody."""
    from iecl_fast.doctor import torchvision_fault

    fault = torchvision_fault()
    if fault is not None:
        raise RunError(f"{fault}; install the torchvision that belongs to it")


def run_pretrain(arguments):
    _check_torchvision()
    from iecl_fast.engine.config import for_method, merge, parse_override, read_recipe, resolve
    from iecl_fast.engine.folder import RunFolder
    from iecl_fast.engine.pretrain import pretrain

    if arguments.resume is not None and arguments.output is not None:
        raise UsageError("--output is for a new run, --resume goes on in its own folder: give one of them")
    if arguments.config is None and arguments.resume is not None:
        mapping = RunFolder.of_run(arguments.resume).read_config()
    else:
        mapping = read_recipe("digits" if arguments.config is None else arguments.config)
    if arguments.method is not None:
        mapping = for_method(mapping, arguments.method)
    named = {
        "data": {"name": arguments.data},
        "trainer": {"epochs": arguments.epochs, "batch_size": arguments.batch_size},
        "seed": arguments.seed,
        "output": arguments.output,
    }
    for layer in (_given(named), *map(parse_override, arguments.overrides)):
        mapping = merge(mapping, layer)
    folder, result = pretrain(resolve(mapping), resume=arguments.resume)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # the processes of other devices run this line too
        print(format_result(result))
        print(f"\nEverything is in {folder.path}")


def run_evaluate(arguments):
    _check_torchvision()
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
        print(f"{name:18} {_percent(value) if '_top' in name else value}")


def sweep_parser():
    parser = Parser(prog="iecl-fast sweep", description=SWEEP_DESCRIPTION, epilog=SWEEP_EXAMPLES)
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="recipes, YAML files; key.sub=value is for all")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each recipe (default: 1)")
    parser.add_argument("--data", metavar="NAME|FOLDER", help="data.name")
    parser.add_argument("--epochs", type=int, metavar="N", help="trainer.epochs")
    parser.add_argument("--batch-size", type=int, metavar="N", help="trainer.batch_size")
    parser.add_argument("--output", default="runs/sweep", metavar="DIR", help="folder (default: runs/sweep)")
    return parser


def run_sweep(arguments):
    _check_torchvision()
    from iecl_fast.engine.config import parse_override
    from iecl_fast.engine.sweep import format_table, sweep

    overrides = [text for text in arguments.configs if "=" in text]
    names = [text for text in arguments.configs if "=" not in text]
    if not names:
        raise UsageError("name at least one recipe or YAML file")
    named = {
        "data": {"name": arguments.data},
        "trainer": {"epochs": arguments.epochs, "batch_size": arguments.batch_size},
    }
    layers = [_given(named), *map(parse_override, overrides)]
    results, failures = sweep(names, seeds=arguments.seeds, output=arguments.output, layers=layers)
    print(format_table(results))
    print(f"\nEverything is in {arguments.output}")
    if failures:
        raise RunError("\n".join([f"{len(failures)} runs failed:", *failures]))


def run_doctor(_arguments):
    from iecl_fast.doctor import report

    print(report())


def doctor_parser():
    return Parser(prog="iecl-fast doctor", description="Print what was built, what each operation uses, and why.")


VERBS = {
    "pretrain": (pretrain_parser, run_pretrain),
    "evaluate": (evaluate_parser, run_evaluate),
    "sweep": (sweep_parser, run_sweep),
    "doctor": (doctor_parser, run_doctor),
}


def format_result(result):
    """The table at the end of a run: accuracies on the test images, before and after the training."""
    lines = [f"{'test accuracy':16}{'untrained':>12}{'trained':>12}"]
    for name, words in (("knn", f"kNN, k={result['knn_k']}"), ("linear", "linear probe")):
        before, after = result[f"{name}_top1_untrained"], result[f"{name}_top1"]
        lines.append(f"{words:16}{_percent(before):>12}{_percent(after):>12}")
    return "\n".join(lines)


def _percent(fraction):
    return f"{100 * fraction:.1f} %"


def _given(values):
    """A nested dict without what was not given on the command line."""
    kept = {key: _given(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in kept.items() if value is not None and value != {}}


def main(argv=None):
    """Run one command.

    Args:
        argv: the words after ``iecl-fast``; by default those of the process.

    Returns:
        int, the exit status.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    top = Parser(prog="iecl-fast", description=DESCRIPTION, usage="iecl-fast [--help] [--version] COMMAND ...")
    top.add_argument("--version", action="version", version=f"iecl-fast {__version__}")
    top.add_argument("command", choices=VERBS, metavar="COMMAND", help=", ".join(VERBS))
    try:
        if not argv:
            top.print_help()
            return 2
        command = top.parse_args(argv[:1]).command
        make_parser, run = VERBS[command]
        run(make_parser().parse_intermixed_args(argv[1:]))
    except SystemExit as stop:  # argparse has printed help or an error
        return stop.code or 0
    except UsageError as error:
        return _fail(error, 2)
    except RunError as error:
        return _fail(error, 1)
    except OSError as error:
        return _fail(error, 1)
    except (Interrupted, KeyboardInterrupt) as error:
        return _fail(error, 128 + getattr(error, "signal_number", 2))
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        return _fail(f"there is not enough memory: try a smaller trainer.batch_size or network. {reason}", 1)
    return 0


def _out_of_memory(error):
    import torch

    # The CPU's allocator has no exception of its own.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def _fail(error, status):
    print(f"iecl-fast: {str(error) or 'interrupted'}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
