"""``iecl-fast evaluate detect`` and ``segment``."""

import importlib.util
import textwrap

from iecl_fast.commands.words import check_torchvision
from iecl_fast.engine.errors import RunError, UsageError
from iecl_fast.evaluate.accuracy import percent

TASKS = ("detect", "segment")
NEEDED = ("torchmetrics", "pycocotools")  # the extra "eval"

HELP = """\
detection and segmentation, on a folder in the format of VOC or COCO (docs/detection.md):
  iecl-fast evaluate detect --checkpoint runs/first --data VOCdevkit
  iecl-fast evaluate detect --checkpoint runs/first --data coco model=keypoint_rcnn --freeze
  iecl-fast evaluate segment --checkpoint runs/first --data VOCdevkit/VOC2012 epochs=10 crop_size=321

  without --output the results lie in a folder under runs; keys of detect, with their values for VOC:
{detect}

  keys of segment:
{segment}
"""


def help_text():
    """What ``evaluate --help`` says of the two tasks."""
    from iecl_fast.evaluate.dense.settings import describe_settings

    keys = {task: textwrap.fill("  ".join(describe_settings(task)), 116, break_on_hyphens=False) for task in TASKS}
    return HELP.format(**{task: textwrap.indent(words, "    ") for task, words in keys.items()})


def run(arguments):
    """Do what ``evaluate``'s parser has understood for one of `TASKS`."""
    check_torchvision()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        has = "them" if len(missing) > 1 else "it"
        raise RunError(
            f"evaluate {arguments.protocol} needs {' and '.join(missing)}: pip install 'iecl_fast[eval]' has {has}"
        )
    if len(arguments.data) != 1:
        raise UsageError(f"evaluate {arguments.protocol} needs --data FOLDER once, in the format of VOC or COCO")
    from iecl_fast.engine.config import override
    from iecl_fast.evaluate.dense.from_checkpoint import evaluate_dense

    folder, result = evaluate_dense(
        arguments.protocol,
        arguments.checkpoint,
        arguments.data[0],
        freeze=arguments.freeze,
        output=arguments.output,
        overrides=override({}, arguments.overrides),
    )
    print("\n".join(_table(result)))
    print(f"\n{result['model']}, {result['test_images']} test images; everything else is in {folder}")


def _table(result):
    """The lines of a result's table."""
    if result["task"] == "segment":
        lines = [f"{name:20} {_percent(value):>8}" for name, value in result["iou_per_class"].items()]
        return [f"{'IoU':20}", *lines, f"{'mean IoU':20} {_percent(result['miou']):>8}"]
    lines = [f"{'':10} {'AP':>8} {'AP50':>8} {'AP75':>8}"]
    for kind in ("box", "mask", "keypoint"):
        if f"{kind}_map" in result:
            values = [_percent(result[f"{kind}_map{part}"]) for part in ("", "50", "75")]
            lines.append(" ".join([f"{kind:10}", *(f"{value:>8}" for value in values)]))
    return lines


def _percent(value):
    return "-" if value is None else percent(value)
