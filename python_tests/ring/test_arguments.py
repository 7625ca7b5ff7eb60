import math

import pytest
import torch

from iecl_fast import RingSchedule, ring_info_nce, ring_sample
from iecl_fast.ring import ring_ranks


def call(query=None, keys=None, lower=10, upper=90, **options):
    query = torch.randn(3, 4) if query is None else query
    keys = torch.randn(50, 4) if keys is None else keys
    return ring_sample(query, keys, lower, upper, **options)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"lower": -1}, ValueError, ["lower", "-1", "0..100"]),
        ({"upper": 100.5}, ValueError, ["upper", "100.5", "0..100"]),
        ({"lower": math.nan}, ValueError, ["lower", "nan"]),
        ({"upper": math.nan}, ValueError, ["upper", "nan"]),
        ({"lower": 50, "upper": 50}, ValueError, ["lower", "upper", "50"]),
        ({"lower": 60, "upper": 50}, ValueError, ["lower", "60", "upper", "50"]),
        ({"lower": 90, "upper": 91, "keys": torch.randn(10, 4)[:9]}, ValueError, ["keep no key", "9 candidate"]),
        ({"keys": torch.randn(0, 4)}, ValueError, ["keep no key", "0 candidate"]),
        ({"query": torch.randn(3, 5)}, ValueError, ["queue", "(50, 4)", "5 channels"]),
        ({"query": torch.randn(4)}, ValueError, ["query", "(4,)"]),
        ({"keys": torch.randn(2, 50, 4)}, ValueError, ["queue", "(2, 50, 4)"]),
        ({"keys": [1, 2]}, TypeError, ["queue", "list"]),
        ({"query": torch.randn(3, 4).double()}, TypeError, ["query", "float64", "float32"]),
        ({"query": torch.ones(3, 4, dtype=torch.int32)}, TypeError, ["query", "int32"]),
        ({"keys": torch.randn(50, 4).half()}, TypeError, ["queue", "float16", "float32"]),
        ({"keys": torch.randn(50, 4, device="meta")}, ValueError, ["queue", "meta", "cpu"]),
        ({"layout": "CN"}, ValueError, ["layout", "CN", "KC"]),
        ({"layout": "CK"}, ValueError, ["queue", "(50, 4)"]),
        ({"num_samples": 0}, ValueError, ["num_samples", "0"]),
        ({"exclude": [0, 1, 2]}, TypeError, ["exclude", "list", "tensor"]),
        ({"exclude": torch.zeros(3)}, TypeError, ["exclude", "float32", "int64"]),
        ({"exclude": torch.zeros(2, dtype=torch.int64)}, ValueError, ["exclude", "(2,)", "(3,)"]),
        ({"exclude": torch.tensor([0, 1, 50])}, ValueError, ["exclude", "50", "49"]),
        ({"exclude": torch.tensor([0, -2, 5])}, ValueError, ["exclude", "-2"]),
        ({"exclude": torch.tensor([0, -1, 5]), "lower": 0, "upper": 100}, ValueError, ["exclude", "-1", "50", "49"]),
    ],
)
def test_sample_says_what_is_wrong(arguments, error, words):
    with pytest.raises(error) as caught:
        call(**arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"temperature": 0}, ValueError, ["temperature", "0"]),
        ({"temperature": -0.1}, ValueError, ["temperature", "-0.1"]),
        ({"temperature": math.nan}, ValueError, ["temperature", "nan"]),
        ({"temperature": torch.tensor(-1.0)}, ValueError, ["temperature", "-1"]),
        ({"temperature": torch.ones(2)}, ValueError, ["temperature", "(2,)"]),
        ({"temperature": torch.tensor(1)}, ValueError, ["temperature", "int64"]),
        ({"reduction": "max"}, ValueError, ["reduction", "max", "mean"]),
        ({"positive_key": [1, 2]}, TypeError, ["positive_key", "list"]),
        ({"positive_key": torch.randn(2, 4)}, ValueError, ["positive_key", "(2, 4)", "(3, 4)"]),
        ({"positive_key": torch.randn(3, 4).bfloat16()}, TypeError, ["positive_key", "bfloat16"]),
        ({"negative_keys": torch.randn(50, 3)}, ValueError, ["negative_keys", "(50, 3)"]),
        ({"negative_keys": torch.empty(0, 4)}, ValueError, ["keep no key"]),
        ({"lower": 99.5, "upper": 99.6}, ValueError, ["keep no key", "50 candidate"]),
    ],
)
def test_loss_says_what_is_wrong(arguments, error, words):
    defaults = {"positive_key": torch.randn(3, 4), "negative_keys": torch.randn(50, 4)}
    with pytest.raises(error) as caught:
        ring_info_nce(torch.randn(3, 4), **{**defaults, **arguments})
    for word in words:
        assert word in str(caught.value)


def test_ranks_are_decimal_and_exact():
    assert ring_ranks(90, 99, 65536) == (58983, 64881)
    # In binary floating point ceil(0.07 * 10000 / 100) is 8 and ceil(16.1 * 1000 / 100) is 162.
    assert ring_ranks(0.07, 16.1, 10000)[0] == 7
    assert ring_ranks(16.1, 32.2, 1000) == (161, 322)
    # float32 cannot hold these.
    assert ring_ranks(50, 99.9999999, 2**40) == (2**39, math.ceil(2**40 * 999999999 / 10**9))
    assert ring_ranks(0, 100, 7) == (0, 7)


def test_ring_is_the_slice_of_the_descending_sort():
    """The authors' code: sort descending, negatives [int(0.01 K), int(0.1 K))."""
    query, keys = torch.randn(4, 8), torch.randn(65536, 8)
    expected = (query @ keys.T).sort(dim=1, descending=True).values[:, 655:6553]
    torch.testing.assert_close(ring_sample(query, keys, 90, 99).sort(dim=1, descending=True).values, expected)


def test_schedule_anneals_linearly_and_stays():
    schedule = RingSchedule(lower=(0, 90), upper=99, steps=100)
    assert schedule(0) == (0, 99)
    assert schedule(50) == (45, 99)
    assert schedule(100) == schedule(10**9) == (90, 99)
    assert RingSchedule(lower=20, upper=80, steps=1)(0) == (20, 80)
    assert repr(schedule) == "RingSchedule(lower=(0, 90), upper=99, steps=100)"


def test_schedule_resumes():
    schedule = RingSchedule(lower=(10, 60), upper=95, steps=1000)
    other = RingSchedule(steps=1)
    other.load_state_dict(schedule.state_dict())
    assert [other(step) for step in range(0, 1100, 50)] == [schedule(step) for step in range(0, 1100, 50)]
    with pytest.raises(ValueError, match="steps"):
        other.load_state_dict({"start": 0})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lower": (0, 101), "steps": 5}, "lower = 101"),
        ({"lower": (-1, 50), "steps": 5}, "lower = -1"),
        ({"upper": 120, "steps": 5}, "upper = 120"),
        ({"lower": (0, 99), "upper": 99, "steps": 5}, "below upper"),
        ({"steps": 0}, "steps = 0"),
    ],
)
def test_schedule_says_what_is_wrong(arguments, words):
    with pytest.raises(ValueError, match=words):
        RingSchedule(**arguments)
    with pytest.raises(ValueError, match="step = -1"):
        RingSchedule(steps=5)(-1)
