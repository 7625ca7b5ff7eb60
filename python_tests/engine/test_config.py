"""Reading, checking and comparing configurations."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from iecl_fast.engine import config as configuration
from iecl_fast.engine.config import (
    describe_keys,
    differences,
    for_method,
    merge,
    override,
    parse_override,
    read_recipe,
    recipes,
    resolve,
)
from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.settings import MAY_DIFFER
from iecl_fast.ssl import METHODS


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_resolves_and_comes_back_from_its_own_yaml(name):
    config = resolve(read_recipe(name))
    again = resolve(yaml.safe_load(yaml.safe_dump(config.to_dict())))
    assert again == config


def test_values_not_given_are_filled_in():
    config = resolve({"data": {"name": "digits"}, "trainer": {"epochs": 7}})
    assert config.trainer.epochs == 7
    assert config.trainer.batch_size == 256
    assert config.method["temperature"] == 0.07
    assert config.views["image_size"] == 32
    assert config.views["flip"] == 0.0  # the digits' own
    assert config.ring is None


def test_a_view_option_over_those_of_the_data_set():
    config = resolve({"views": {"flip": 0.5, "crop_scale": [0.3, 1], "blur": None}})
    assert config.views["flip"] == 0.5
    assert config.views["crop_scale"] == (0.3, 1.0)
    assert config.views["blur"] == resolve({}).views["blur"]


@pytest.mark.parametrize(
    ("text", "nested"),
    [
        ("seed=3", {"seed": 3}),
        ("ring=null", {"ring": None}),
        ("ring.lower=[0, 90]", {"ring": {"lower": [0, 90]}}),
        ("data.name=a=b", {"data": {"name": "a=b"}}),
        ("data.name=", {"data": {"name": None}}),
    ],
)
def test_override(text, nested):
    assert parse_override(text) == nested


@pytest.mark.parametrize("text", ["seed", "=3", "a..b=1", "a b=1", "--seed=1"])
def test_what_is_no_override(text):
    with pytest.raises(UsageError, match=r"group\.key=value"):
        parse_override(text)


def test_an_override_whose_value_is_no_yaml():
    with pytest.raises(UsageError, match=r"ring\.lower: '\[0' is not a YAML value"):
        parse_override("ring.lower=[0")


def test_merge_goes_into_groups_and_changes_neither():
    base, layer = {"a": {"b": 1, "c": 2}, "ring": {"upper": 99}}, {"a": {"c": 3}, "ring": None}
    assert merge(base, layer) == {"a": {"b": 1, "c": 3}, "ring": None}
    assert merge(merge(base, layer), {"ring": {"lower": 5}})["ring"] == {"lower": 5}
    assert base == {"a": {"b": 1, "c": 2}, "ring": {"upper": 99}}


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"method": {"temprature": 0.1}}, "there is no key method.temprature; did you mean method.temperature?"),
        ({"temperature": 0.1}, "there is no key temperature; did you mean method.temperature?"),
        ({"optimiser": {"lr": 1}}, "there is no key optimiser.lr; did you mean optimizer.lr?"),
        ({"trainer": {"batchsize": 3}}, "did you mean trainer.batch_size?"),
        ({"views": {"crop": 3}}, "did you mean views.crop_scale?"),
        ({"sed": 3}, "there is no key sed; did you mean seed?"),
        ({"ring": {"lowre": 3}}, "did you mean ring.lower?"),
        ({"qqq": 3}, "there is no key qqq"),
        ({"method": {"name": "mocco"}}, "; did you mean moco?"),
        ({"method": {"head": "lienar"}}, "method.head: 'lienar' is not allowed"),
        ({"method": {"temperature": "hot"}}, "method.temperature: 'hot' is not allowed, it must be a finite number"),
        ({"encoder": {"name": "resnet81"}}, "did you mean resnet18?"),
        ({"encoder": {"width": 0}}, "encoder.width: 0 is not allowed, it must be at least 1"),
        ({"ring": {"lower": [0, 101]}}, "ring.lower"),
        ({"ring": 5}, "ring is a group"),
        ({"method": {"name": "byol"}, "ring": {}}, "ring: byol takes no ring; write ring=null, or choose one of moco"),
        ({"saib": {"patch_size": 3}}, "saib.patch_size: 3 is not allowed, it must divide views.image_size=32"),
        ({"saib": {"patchsize": 4}}, "did you mean saib.patch_size?"),
        ({"saib": True}, "saib is a group"),
        ({"method": "moco"}, "method is a group: write method.KEY=VALUE"),
        ({"data": {"name": "cifar01"}}, "did you mean cifar10?"),
        ({"data": {"name": "no/such/folder"}}, "no/such/folder"),
        ({"views": {"flip": 3.0}}, "views"),
        ({"method": {"lr": {}}}, "there is no key method.lr"),
        ({"views": {"image_size": 0}}, "views: image_size = 0 is not allowed"),
        ({"views": {"crop_scale": [1.0, 0.5]}}, "views: crop_scale = (1.0, 0.5) is not allowed"),
        ({"views": {"std": [0.2, 0.0, 0.2]}}, "views: std = (0.2, 0.0, 0.2) is not allowed"),
        ({"trainer": {"precision": "bf16"}}, "did you mean bf16-mixed?"),
        ({"trainer": {"threads": 10**6}}, "trainer.threads: 1000000 is not allowed"),
        ({"seed": -1}, "seed: -1 is not allowed"),
        ({"schedule": {"name": "step"}}, "schedule.milestones"),
        ({"schedule": {"warmup_epochs": 200}}, "must be below trainer.epochs=200"),
    ],
)
def test_refused(mapping, words):
    with pytest.raises(UsageError) as caught:
        resolve(mapping)
    assert words in str(caught.value)


KEYS = st.sampled_from(["name", "lr", "lower", "width", "flip", "y"])


@given(
    st.dictionaries(
        st.sampled_from(["method", "ring", "encoder", "data", "views", "trainer", "seed", "output", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.integers(), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    )
)
def test_whatever_yaml_holds_is_resolved_or_refused_with_a_message(mapping):
    try:
        config = resolve(mapping)
    except UsageError as error:
        assert str(error)
    else:
        assert resolve(config.to_dict()) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "not valid YAML"),
        ("a:\n\t- b", "not valid YAML"),
        ("- 1\n- 2", "must hold a mapping"),
        ("\x00\xff", "not valid YAML"),
        ("trainer: &group\n  x: *group\n", "nested too deeply"),
        (f"seed: {'9' * 5000}", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path, text, words):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=words) as caught:
        read_recipe(str(path))
    assert "recipe.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_file_is_all_defaults(tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read_recipe(str(tmp_path / "empty.yaml")) == {}


def test_a_misspelt_recipe():
    with pytest.raises(UsageError, match="did you mean digits"):
        read_recipe("digit")


def test_a_bank_starts_from_its_own_defaults():
    config = resolve(for_method(read_recipe("cifar10_moco_ring"), "ir"))
    assert config.method["momentum"] == 0.5 and config.ring.upper == 99  # the recipe's 0.99 is of a key encoder
    assert "num_images" not in config.method
    config = resolve(for_method(read_recipe("cifar10_ir_ring"), "la"))
    assert config.ring is None and config.method["temperature"] == 0.1


def test_differences_name_each_key_and_leave_out_what_may_differ():
    saved = resolve(read_recipe("digits")).to_dict()
    wanted = merge(saved, {"method": {"temperature": 0.5}, "ring": None, "output": "x", "data": {"workers": 3}})
    named = {key: (old, new) for key, old, new in differences(saved, wanted)}
    assert named["method.temperature"] == (saved["method"]["temperature"], 0.5)
    assert named["ring.upper"] == (saved["ring"]["upper"], "(not set)")
    assert named["ring"] == ("(not set)", None)
    assert not {"output", "data.workers"} & named.keys()
    assert differences(saved, saved) == []


def test_what_may_differ_exists():
    configs = (resolve({"method": {"name": name}}).to_dict() for name in METHODS)
    assert set(MAY_DIFFER) <= {key for config in configs for key in configuration.flatten(config)}


def test_keys_are_listed_as_they_are_typed():
    lines = describe_keys()
    assert "data.name=digits" in lines
    assert "output=null" in lines
    assert resolve(override({}, lines)) == resolve(read_recipe("digits"))


def test_a_data_folder_is_kept_by_its_full_path(tmp_path, monkeypatch):
    from PIL import Image

    for part in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            Image.new("RGB", (40, 40)).save(tmp_path / "photos" / part / name / "1.png")
    monkeypatch.chdir(tmp_path)
    config = resolve({"data": {"name": "photos"}})
    assert config.data.name == str(tmp_path / "photos")
    assert config.views["image_size"] == 40


@pytest.mark.parametrize(
    ("image_size", "patch_size"), [(32, 4), (224, 16), (96, 6), (24, 4), (50, 2), (31, 1), (8, 4), (3, 3)]
)
def test_a_patch_size_that_suits_the_images(image_size, patch_size):
    config = resolve({"saib": {}, "views": {"image_size": image_size}})
    assert config.saib.patch_size is None
    assert config.saib.patch_size_for(image_size) == patch_size


def test_null_is_a_value_where_the_type_has_it_and_else_stands_for_the_default():
    """IE-CL's projector has 4096 hidden units by default; null is as many as the backbone has features."""
    config = resolve({"method": {"name": "iecl", "hidden_dim": None, "temperature": None}})
    assert config.method["hidden_dim"] is None
    assert config.method["temperature"] == 0.2
    assert resolve(config.to_dict()) == config
