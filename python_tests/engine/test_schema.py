"""Typed values: what a declaration allows, and what the message says when it does not."""

from typing import Annotated, Literal

import pytest

from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.schema import Range, convert, nearest

Percent = Annotated[float, Range(minimum=0, maximum=100)]


@pytest.mark.parametrize(
    ("value", "declared", "expected"),
    [
        (3, int, 3),
        (3, float, 3.0),
        ("1e-4", float, 1e-4),  # what YAML 1.1 makes of 1e-4
        (True, bool, True),
        ("x", str, "x"),
        (None, int | None, None),
        (3, int | None, 3),
        ("auto", Annotated[int, Range(minimum=1)] | Literal["auto"], "auto"),
        ([0, 90], tuple[Percent, Percent], (0.0, 90.0)),
        ([1, 2, 3], tuple[int, ...], (1, 2, 3)),
        ([], tuple[int, ...], ()),
        (50, tuple[Percent, Percent] | Percent, 50.0),
        (100, Percent, 100.0),
    ],
)
def test_allowed(value, declared, expected):
    converted = convert(value, declared, "key")
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "declared", "words"),
    [
        (True, int, "a whole number"),
        (2.5, int, "a whole number"),
        ("three", float, "a finite number"),
        (float("nan"), float, "a finite number"),
        (float("inf"), float, "a finite number"),
        (True, float, "a finite number"),
        (1, bool, "true or false"),
        (5, str, "text"),
        ("linaer", Literal["linear", "mlp"], "one of linear, mlp; did you mean linear?"),
        (101, Percent, "at least 0 and at most 100"),
        (0, Annotated[float, Range(above=0)], "above 0"),
        ([1], tuple[Percent, Percent], "a list of 2 values"),
        ([1, 200], tuple[Percent, Percent], "each at least 0 and at most 100"),
        ("12", tuple[int, ...], "a list of values"),
        ("x", Annotated[int, Range(minimum=1)] | None, "a whole number or null"),
    ],
)
def test_refused_with_key_value_and_what_is_allowed(value, declared, words):
    with pytest.raises(UsageError) as caught:
        convert(value, declared, "group.key")
    message = str(caught.value)
    assert message.startswith(f"group.key: {value!r} is not allowed, it must be ")
    assert words in message


def test_a_type_that_yaml_cannot_give_is_a_mistake_of_the_programmer():
    with pytest.raises(TypeError, match="bytes"):
        convert(b"", bytes, "key")


def test_nearest_spelling():
    assert nearest("temprature", ["temperature", "momentum"]) == "temperature"
    assert nearest("zzz", ["temperature", "momentum"]) is None
