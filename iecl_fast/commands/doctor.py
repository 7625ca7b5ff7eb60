"""``iecl-fast doctor``."""

from iecl_fast.commands.words import Parser


def parser():
    return Parser(prog="iecl-fast doctor", description="Print what was built, what each operation uses, and why.")


def run(_arguments):
    from iecl_fast.doctor import report

    print(report())
