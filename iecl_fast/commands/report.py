"""``iecl-fast report``."""

from pathlib import Path

from iecl_fast.commands.words import Parser, check_torchvision, place

DESCRIPTION = """\
Make one HTML page over runs: accuracies side by side, curves, neighbours of sample images, features in the plane,
views, settings. Everything is inside the file: it opens without a network.
"""

EXAMPLES = """\
examples:
  iecl-fast report runs/first
  iecl-fast report runs/first runs/second --output comparison.html
  iecl-fast report runs/sweep                     the runs of each recipe together, mean and deviation over the seeds

Of a run that is not finished, or has no checkpoint or no data any more, the page shows what is there, and says what is
not.
"""


def parser():
    command = Parser(prog="iecl-fast report", description=DESCRIPTION, epilog=EXAMPLES)
    words = "run folder, or folder of iecl-fast sweep or evaluate"
    command.add_argument("runs", nargs="+", type=place, metavar="RUN", help=words)
    words = "a new file (default: report.html)"
    command.add_argument("--output", type=place, default="report.html", metavar="FILE", help=words)
    return command


def run(arguments):
    check_torchvision()
    from iecl_fast.engine.checkpoint import whole_file
    from iecl_fast.engine.folder import check_new_file
    from iecl_fast.report.page import report

    target = Path(arguments.output)
    check_new_file(target)
    page = report(arguments.runs)
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as file:
        file.write(page.encode(errors="backslashreplace"))  # names of files may hold bytes that are no text
    print(f"The report is {target}")
