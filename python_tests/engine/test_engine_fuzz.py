"""Any text that a user may type, any order of images, any schedule of the learning rate."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from iecl_fast.engine.batches import EpochBatches
from iecl_fast.engine.config import describe_keys, for_method, merge, parse_override, parse_yaml, recipes, resolve
from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.schedule import learning_rate
from iecl_fast.engine.settings import ScheduleConfig
from iecl_fast.ssl import METHODS

KEYS = sorted(
    {line.partition("=")[0] for line in describe_keys()} | {"schedule.milestones", "ring.lower", "saib.cascade"}
)
# Letters that YAML gives a meaning to, and numbers that are none or too large.
texts = st.text(max_size=12) | st.text(alphabet="[]{}:,-&*!|>#%@`'\"\\ \n\t0123456789eE.+nulltruefals~<", max_size=20)
typed = texts | st.sampled_from(
    [
        "1e400",
        "-.inf",
        ".nan",
        "[0, 90]",
        "{a: 1}",
        "null",
        "0x1F",
        "1_000",
        "2020-01-01",
        "!!python/name:os.system",
        "*a",
    ]
)


def message_of(function, *arguments):
    """The result, or the message of a UsageError, which is the only error that a user may cause."""
    try:
        return function(*arguments), None
    except UsageError as error:
        assert str(error) and "Traceback" not in str(error)
        return None, str(error)


@given(typed, typed)
def test_any_text_as_an_override(key, value):
    for text in (key, f"{key}={value}"):
        nested, message = message_of(parse_override, text)
        assert (nested is None) == (message is not None)
        assert nested is None or isinstance(nested, dict)


@given(st.lists(st.tuples(st.sampled_from(KEYS), typed), max_size=4))
def test_any_values_of_known_keys_resolve_or_are_refused(pairs):
    mapping = {}
    for key, value in pairs:
        nested, _ = message_of(parse_override, f"{key}={value}")
        mapping = merge(mapping, nested or {})
    config, _ = message_of(resolve, mapping)
    if config is not None:
        assert resolve(config.to_dict()) == config


@given(typed | st.binary(max_size=40).map(lambda text: text.decode(errors="replace")))
def test_any_file_as_a_recipe(text):
    mapping, _ = message_of(parse_yaml, text, "recipe.yaml")
    if mapping is not None:
        message_of(resolve, mapping)


@given(st.sampled_from(recipes()), st.sampled_from(sorted(METHODS)))
def test_any_method_in_place_of_a_recipes_own(recipe, method):
    from iecl_fast.engine.config import read_recipe

    mapping = for_method(read_recipe(recipe), method)
    config, message = message_of(resolve, mapping)
    assert message is None or "data" in message  # a data set that is not here
    assert config is None or config.method["name"] == method


@given(
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(0, 2**62),
    st.integers(0, 10**6),
    st.integers(0, 3),
)
def test_ranks_share_the_batches_of_one_process(world, samples, each, seed, epoch, start):
    if samples < world:
        return
    size = each * world
    options = {"seed": seed, "epoch": epoch}
    whole = list(EpochBatches(samples, size, **options))
    parts = [
        EpochBatches(samples, size, **options, start=start, rank=rank, world_size=world)
        for rank in range(world)
        if start <= len(whole)
    ]
    lists = [list(part) for part in parts]
    for batches, sampler in zip(lists, parts):
        assert len(batches) == len(sampler)
    for batch in zip(*lists):
        indices = list(itertools.chain(*batch))
        assert len(set(indices)) == len(indices) and set(indices) <= set(range(samples))
        assert len({len(own) for own in batch}) == 1
    if samples >= size:
        for number, batch in enumerate(zip(*lists), start):
            assert sorted(itertools.chain(*batch)) == sorted(whole[number])


@given(st.data())
def test_learning_rate_stays_within_its_peak(data):
    name = data.draw(st.sampled_from(["cosine", "step", "constant"]))
    epochs, steps_per_epoch = data.draw(st.integers(1, 50)), data.draw(st.integers(1, 1000))
    warmup = data.draw(st.floats(0, epochs, exclude_max=True))
    milestones = tuple(sorted(data.draw(st.lists(st.integers(1, 60), min_size=name == "step", max_size=3))))
    schedule = ScheduleConfig(name=name, warmup_epochs=warmup, milestones=milestones, gamma=0.1)
    total, peak = epochs * steps_per_epoch, data.draw(st.floats(1e-6, 100))
    some = data.draw(st.lists(st.integers(0, total - 1), max_size=8))
    some = sorted({0, total - 1, *some})
    options = {"peak": peak, "schedule": schedule, "steps_per_epoch": steps_per_epoch, "total_steps": total}
    rates = [learning_rate(step, **options) for step in some]
    assert all(math.isfinite(rate) and 0 <= rate <= peak for rate in rates)
    warm = round(warmup * steps_per_epoch)
    rising, falling = ([rate for step, rate in zip(some, rates) if (step < warm) == early] for early in (True, False))
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
