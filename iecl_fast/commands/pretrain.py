"""``iecl-fast pretrain``."""

import textwrap

from iecl_fast.commands.words import Parser, check_torchvision, given, place
from iecl_fast.engine.errors import UsageError
from iecl_fast.evaluate.accuracy import percent

DESCRIPTION = """\
Train an encoder without labels, then measure its features by kNN and by a linear classifier, before and after.

Without arguments: IE-CL with Ring negatives on scikit-learn's handwritten digits, in a little over two minutes.
"""

EXAMPLES = """\
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
  iecl-fast pretrain trainer.devices=4 --dry-run              what a run would be, without running it
  torchrun --nproc-per-node 4 -m iecl_fast.cli pretrain       processes by torchrun, also on several machines

recipes for --config (or a YAML file of yours with the same keys):
  {recipes}

a run folder holds:
  config.yaml             every value that was used
  environment.json        versions and hardware
  metrics.csv             losses and the like over the steps; as a picture curves.png, for TensorBoard tensorboard/
  views.png               what SAIB makes of some views
  checkpoints/last.ckpt   to resume and to evaluate
  result.json             the accuracies, before and after

keys and their values in the recipe digits (docs/settings.md explains them; of a run: --dry-run):
{keys}
"""


class PretrainParser(Parser):
    """Lists recipes and keys in its help; they are looked up only when it is asked for."""

    def format_help(self):
        from iecl_fast.engine.config import describe_keys, recipes

        keys = "".join(f"  {line}\n" for line in describe_keys())
        names = textwrap.fill("  ".join(recipes()), 116, subsequent_indent="  ", break_on_hyphens=False)
        self.epilog = EXAMPLES.format(recipes=names, keys=keys)
        return super().format_help()


def parser():
    command = PretrainParser(prog="iecl-fast pretrain", description=DESCRIPTION)
    command.add_argument("--config", metavar="FILE", help="YAML file, or the name of a recipe (default: digits)")
    command.add_argument("--method", metavar="NAME", help="method.name, with its own defaults")
    names = "digits, cifar10, cifar100, stl10, imagenet, aircraft, dtd, flowers102, food101, gtsrb, pets, svhn"
    command.add_argument("--data", metavar="NAME|FOLDER", help=f"{names}, or a folder")
    command.add_argument("--epochs", type=int, metavar="N", help="trainer.epochs")
    command.add_argument("--batch-size", type=int, metavar="N", help="trainer.batch_size")
    command.add_argument("--compile", action="store_true", default=None, help="trainer.compile=true")
    command.add_argument("--seed", type=int, metavar="N", help="of weights, order and augmentations")
    words = "run folder, a new one (default: runs/<method>-<data>-<time>)"
    command.add_argument("--output", type=place, metavar="DIR", help=words)
    words = "run folder to go on with, from its last checkpoint"
    command.add_argument("--resume", type=place, metavar="DIR", help=words)
    command.add_argument("--dry-run", action="store_true", help="print the effective settings as YAML and do nothing")
    command.add_argument("overrides", nargs="*", metavar="key.sub=value", help="any value of the configuration")
    return command


def run(arguments):
    check_torchvision()
    from iecl_fast.engine.config import DEFAULT_RECIPE, for_method, merge, override, read_recipe, resolve
    from iecl_fast.engine.folder import RunFolder
    from iecl_fast.engine.plan import format_plan
    from iecl_fast.engine.pretrain import pretrain
    from iecl_fast.engine.processes import is_first_process

    if arguments.resume is not None and arguments.output is not None:
        raise UsageError("--output is for a new run, --resume goes on in its own folder: give one of them")
    if arguments.config is None and arguments.resume is not None:
        mapping = RunFolder.of_run(arguments.resume).read_config()
    else:
        mapping = read_recipe(DEFAULT_RECIPE if arguments.config is None else arguments.config)
    if arguments.method is not None:
        mapping = for_method(mapping, arguments.method)
    named = {
        "data": {"name": arguments.data},
        "trainer": {"epochs": arguments.epochs, "batch_size": arguments.batch_size, "compile": arguments.compile},
        "seed": arguments.seed,
        "output": arguments.output,
    }
    config = resolve(override(merge(mapping, given(named)), arguments.overrides))
    if arguments.dry_run:
        plan = format_plan(config, arguments.resume)  # in every process: each has to refuse what it cannot do
        if is_first_process():
            print(plan, end="")
        return
    folder, result = pretrain(config, resume=arguments.resume)
    if is_first_process():  # the processes of other devices run this line too
        print(format_result(result))
        print(f"\nEverything is in {folder.path}")


def format_result(result):
    """The table at the end of a run: accuracies on the test images, before and after the training."""
    lines = [f"{'test accuracy':16}{'untrained':>12}{'trained':>12}"]
    for name, words in (("knn", f"kNN, k={result['knn_k']}"), ("linear", "linear probe")):
        before, after = result[f"{name}_top1_untrained"], result[f"{name}_top1"]
        lines.append(f"{words:16}{percent(before):>12}{percent(after):>12}")
    return "\n".join(lines)
