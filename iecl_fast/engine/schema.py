"""Typed values from YAML: what a dataclass or a signature declares is what a configuration may hold.

A declaration is ordinary typing: ``int``, ``float``, ``bool``, ``str``, ``Literal[...]``, ``tuple[float, float]``,
``X | None``, unions of these, and ``Annotated[X, Range(...)]`` where numbers have bounds.
"""

import difflib
import math
import types
import typing
from dataclasses import dataclass

from iecl_fast.engine.errors import UsageError


@dataclass(frozen=True)
class Range:
    """Bounds of a number: ``minimum <= value <= maximum``, with ``above`` for an open lower bound."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None

    def allows(self, value):
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
        )

    def __str__(self):
        words = []
        if self.minimum is not None:
            words.append(f"at least {self.minimum}")
        if self.above is not None:
            words.append(f"above {self.above}")
        if self.maximum is not None:
            words.append(f"at most {self.maximum}")
        return " and ".join(words)


def nearest(word, candidates):
    """The candidate whose spelling is closest to `word`, or None when none is near."""
    matches = difflib.get_close_matches(str(word), [str(candidate) for candidate in candidates], n=1, cutoff=0.5)
    return matches[0] if matches else None


def did_you_mean(word, candidates):
    """``"; did you mean X?"``, or an empty string when nothing is near."""
    match = nearest(word, candidates)
    return f"; did you mean {match}?" if match is not None else ""


def convert(value, declared, name):
    """`value` as the declared type, or a UsageError that names the key, the value and what is allowed.

    Lists become tuples. A number where a float is declared may be an int, or a string such as ``"1e-4"``, which YAML
    1.1 does not take for a number.

    Args:
        value: what YAML gave.
        declared: the type, as the module's docstring lists them.
        name: dotted key, for the message.
    """
    try:
        return _convert(value, declared)
    except ValueError as error:
        raise UsageError(f"{name}: {value!r} is not allowed, it must be {error}") from None


def allows_null(declared):
    """Whether null is a value of a declared type."""
    return type(None) in typing.get_args(declared)


def _convert(value, declared):
    origin, arguments = typing.get_origin(declared), typing.get_args(declared)
    if origin is typing.Annotated:
        converted = _convert(value, arguments[0])
        if converted is not None and not arguments[1].allows(converted):
            raise ValueError(str(arguments[1]))
        return converted
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, arguments)
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise ValueError(f"one of {', '.join(map(str, arguments))}{did_you_mean(value, arguments)}")
    if origin is tuple:
        return _convert_tuple(value, arguments)
    return _convert_scalar(value, declared)


def _convert_union(value, members):
    if value is None and type(None) in members:
        return None
    reasons = []
    for member in members:
        if member is type(None):
            reasons.append("null")
            continue
        try:
            return _convert(value, member)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(" or ".join(reasons))


def _convert_tuple(value, members):
    variadic = len(members) == 2 and members[1] is Ellipsis
    words = f"a list of {'' if variadic else f'{len(members)} '}values"
    if not isinstance(value, (list, tuple)) or (not variadic and len(value) != len(members)):
        raise ValueError(words)
    declared = [members[0]] * len(value) if variadic else members
    try:
        return tuple(_convert(item, member) for item, member in zip(value, declared, strict=True))
    except ValueError as error:
        raise ValueError(f"{words}, each {error}") from None


def _convert_scalar(value, declared):
    if declared is bool:
        if isinstance(value, bool):
            return value
        raise ValueError("true or false")
    if declared is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise ValueError("a whole number")
    if declared is float:
        try:
            number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
        raise ValueError("a finite number")
    if declared is str:
        if isinstance(value, str):
            return value
        raise ValueError("text (put it in quotes)")
    raise TypeError(f"a configuration value cannot be declared as {declared}")
