"""``iecl-fast sweep``."""

from iecl_fast.commands.words import Parser, check_torchvision, given, place
from iecl_fast.engine.errors import RunError, UsageError

DESCRIPTION = """\
Train several recipes with several seeds, one after the other, and print mean and deviation of what they reach.

A packaged sweep, or a YAML file with the group sweep, names recipes and the values of one key to train each with.
"""

EXAMPLES = """\
examples:
  iecl-fast sweep digits digits_moco --seeds 3
  iecl-fast sweep iecl_cifar10 mine.yaml --seeds 3 --output runs/comparison data.limit=10000 trainer.epochs=20
  iecl-fast sweep augmentations_cifar10 --seeds 3                       accuracy against the set of augmentations

packaged sweeps:
  {sweeps}

The runs lie in OUTPUT/<recipe>/seed<number>, those of a sweep in OUTPUT/<recipe>/<value>/seed<number>. Called again it
goes on where it was stopped, and what is finished is only read; nothing is overwritten. A run that fails does not keep
the others from being trained; a damaged one is said before any is. Beside them: summary.json, and
curves.png with a curve for each recipe; of a sweep accuracy.png too, the accuracy against the value.
"""


class SweepParser(Parser):
    """Lists the packaged sweeps in its help; they are looked up only when it is asked for."""

    def format_help(self):
        from iecl_fast.engine.sweep_recipe import sweeps

        self.epilog = EXAMPLES.format(sweeps="  ".join(sweeps()))
        return super().format_help()


def parser():
    command = SweepParser(prog="iecl-fast sweep", description=DESCRIPTION)
    words = "recipes, YAML files, or one sweep; key.sub=value is for all"
    command.add_argument("configs", nargs="+", metavar="CONFIG", help=words)
    command.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each recipe (default: 1)")
    command.add_argument("--data", metavar="NAME|FOLDER", help="data.name")
    command.add_argument("--epochs", type=int, metavar="N", help="trainer.epochs")
    command.add_argument("--batch-size", type=int, metavar="N", help="trainer.batch_size")
    words = "folder (default: runs/sweep)"
    command.add_argument("--output", type=place, default="runs/sweep", metavar="DIR", help=words)
    return command


def run(arguments):
    check_torchvision()
    from iecl_fast.engine.config import parse_override
    from iecl_fast.engine.sweep import format_table, sweep
    from iecl_fast.engine.sweep_recipe import read_sweep

    overrides = [text for text in arguments.configs if "=" in text]
    names = [text for text in arguments.configs if "=" not in text]
    if not names:
        raise UsageError("name at least one recipe or YAML file")
    found = [recipe for recipe in map(read_sweep, names) if recipe is not None]
    if found and len(names) > 1:
        raise UsageError(f"{', '.join(names)}: a sweep names its own configurations, give it alone")
    named = {
        "data": {"name": arguments.data},
        "trainer": {"epochs": arguments.epochs, "batch_size": arguments.batch_size},
    }
    layers = [given(named), *map(parse_override, overrides)]
    axis = None
    if found:
        (recipe,) = found
        names, axis, layers = recipe.configs, recipe.axis, [recipe.layer, *layers]
    results, failures = sweep(names, seeds=arguments.seeds, output=arguments.output, layers=layers, axis=axis)
    print(format_table(results))
    print(f"\nEverything is in {arguments.output}")
    if failures:
        raise RunError("\n".join([f"{len(failures)} runs failed:", *failures]))
