"""Every packaged recipe can be run on the digits: it is built as small as can be, and takes a step."""

import pytest
import torch

from iecl_fast.engine import build
from iecl_fast.engine.config import for_method, merge, read_recipe, recipes, resolve
from iecl_fast.engine.errors import UsageError
from iecl_fast.ssl import METHODS

SMALL = {"num_keys": 64, "dim": 16, "hidden_dim": 32, "num_samples": 32, "num_clusters": 8}


def small(mapping):
    """The recipe on the digits, with a network of width 2 and of its numbers only the large ones changed."""
    options = resolve(mapping).method
    method = {key: value for key, value in SMALL.items() if options.get(key) is not None}
    layer = {"method": method, "data": {"name": "digits"}, "encoder": {"width": 2, "name": "resnet18"}}
    return resolve(merge(mapping, layer))


def take_a_step(config):
    torch.manual_seed(0)
    method = build.method(config, total_steps=10, batch_size=8, num_images=100)
    optimizer = build.optimizer(config.optimizer, method)
    size = config.views["image_size"]
    losses = method([torch.randn(8, 3, size, size) for _ in range(method.num_views)], torch.arange(8))
    sum(losses.values()).backward()
    optimizer.step()
    method.after_step()
    assert all(loss.isfinite() for loss in losses.values())
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in method.parameters() if p.grad is not None}
    return method, losses


@pytest.mark.parametrize("name", recipes())
def test_each_takes_a_step_on_the_digits(name):
    method, losses = take_a_step(small(read_recipe(name)))
    if name.startswith("iecl_") and "ablation" not in name:
        assert list(losses) == ["contrast", "kl", "entropy"]
        assert method.spectral and method.saib.channels == "batch"


def test_the_ablation_has_its_eight_rows():
    names = [name for name in recipes() if "ablation" in name]
    rows = {"iecl_cifar10"} | set(names)
    switches = set()
    for name in rows:
        config = resolve(read_recipe(name))
        terms = {config.method["entropy_weight"] > 0, config.method["kl_weight"] > 0}
        assert len(terms) == 1
        switches.add((config.saib is not None, config.method["spectral"], terms.pop()))
        shared = config.to_dict()
        for group, key in (("method", "spectral"), ("method", "entropy_weight"), ("method", "kl_weight")):
            del shared[group][key]
        del shared["saib"]
        assert shared == {**shared, **_shared_of("iecl_cifar10")}
    assert len(rows) == len(switches) == 8


def _shared_of(name):
    shared = resolve(read_recipe(name)).to_dict()
    for key in ("spectral", "entropy_weight", "kl_weight"):
        del shared["method"][key]
    del shared["saib"]
    return shared


@pytest.mark.parametrize("number", [2, 3])
def test_saibs_in_a_row(number):
    config = small(read_recipe(f"iecl_cifar10_{number}x"))
    method, _ = take_a_step(config)
    assert len(method.saib.further) == number - 1


def test_a_base_is_gone_over(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("base: iecl_cifar10_ring\nring:\n  upper: 95\nmethod:\n  temperature: 0.3\n")
    config, base = resolve(read_recipe(str(recipe))), resolve(read_recipe("iecl_cifar10_ring"))
    assert (config.ring.lower, config.ring.upper) == (base.ring.lower, 95)
    assert config.method == base.method | {"temperature": 0.3}
    recipe.write_text("base: iecl_cifar01\n")
    with pytest.raises(UsageError, match=r"base: 'iecl_cifar01' in .* did you mean iecl_cifar10"):
        read_recipe(str(recipe))
    recipe.write_text(f"base: {recipe}\n")
    with pytest.raises(UsageError, match="must be a recipe"):
        read_recipe(str(recipe))


@pytest.mark.parametrize("name", METHODS)
def test_the_default_recipe_with_another_method(name):
    mapping = read_recipe("digits")
    config = small(for_method(mapping, name))
    assert config.method["name"] == name
    assert config.method["dim"] == 16
    assert (config.ring is None) == (name in ("byol", "simsiam", "la"))
    assert (config.saib is None) == (name in ("ir", "cmc", "la"))
    assert config.method.get("momentum") != 0.99 or name not in ("ir", "cmc", "la")  # of a key encoder, not of a bank
    take_a_step(config)
    assert mapping == read_recipe("digits")


def test_another_method_takes_no_misspelt_option_along():
    with pytest.raises(UsageError, match=r"there is no key method\.tempreture"):
        resolve(for_method({"method": {"name": "moco", "tempreture": 0.1, "num_keys": 8}}, "simclr"))
    with pytest.raises(UsageError, match=r"method\.name: 'bylo' .* did you mean byol"):
        resolve(for_method({"method": {"name": "moco"}}, "bylo"))
    with pytest.raises(UsageError, match=r"there is no key method\.dimm"):
        resolve(for_method({"method": {"name": ["moco"], "dimm": 3}}, "byol"))
