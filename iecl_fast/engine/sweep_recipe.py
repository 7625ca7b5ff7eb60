"""Recipes of sweeps: several configurations, each with every value of one key.

A YAML file is one when it has the group ``sweep``; what else is in it goes over every configuration::

    sweep:
      configs: {IE-CL: iecl_cifar10, MoCo: cifar10_moco_v2}     # a line of the picture, and the recipe or YAML file
      key: views.set
      values: [full, crop_only]
    trainer:
      epochs: 100
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from iecl_fast.engine.config import parse_yaml, recipes
from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.schema import did_you_mean

KEYS = ("configs", "key", "values")


@dataclass(frozen=True)
class Axis:
    """The one key whose values a sweep goes through.

    Attributes:
        key: dotted.
        values: texts and numbers.
    """

    key: str
    values: tuple

    def layer(self, value):
        """The nested mapping that sets the key."""
        for part in reversed(self.key.split(".")):
            value = {part: value}
        return value


@dataclass(frozen=True)
class SweepRecipe:
    """What a file says.

    Attributes:
        configs: dict from a label, which is a folder's name too, to a recipe or YAML file.
        axis: `Axis`.
        layer: nested mapping over every configuration.
    """

    configs: dict
    axis: Axis
    layer: dict


def sweeps():
    """Names of the packaged sweeps."""
    folder = resources.files("iecl_fast").joinpath("sweeps")
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def read_sweep(name):
    """The `SweepRecipe` of a packaged name or of a YAML file, or None where that is a run's configuration.

    Raises:
        UsageError: there is nothing of that name, or a group ``sweep`` is not as it has to be.
    """
    if name in recipes():
        return None
    if name in sweeps():
        text = resources.files("iecl_fast").joinpath("sweeps", f"{name}.yaml").read_text()
    elif Path(name).is_file():
        text = Path(name).read_text(errors="replace")
    else:
        known = [*recipes(), *sweeps()]
        raise UsageError(
            f"there is no file {name}, nor a recipe or sweep of that name{did_you_mean(name, known)}; "
            f"they are {', '.join(known)}"
        )
    mapping = parse_yaml(text, name)
    group = mapping.pop("sweep", None)
    return None if group is None else SweepRecipe(*_checked(group, name), mapping)


def _checked(group, name):
    """The configurations and the axis."""
    if not isinstance(group, dict) or sorted(group, key=str) != sorted(KEYS):
        keys = ", ".join(map(str, group)) if isinstance(group, dict) else repr(group)
        raise UsageError(f"sweep in {name}: {keys} is not allowed, it must have the keys {', '.join(KEYS)}")
    configs, key, values = (group[word] for word in KEYS)
    if not isinstance(configs, dict) or not configs or not all(map(_is_name, [*configs, *configs.values()])):
        raise UsageError(f"sweep.configs in {name}: {configs!r} is not allowed, it must name a recipe for each label")
    if not isinstance(key, str) or not all(part.isidentifier() for part in key.split(".")):
        raise UsageError(f"sweep.key in {name}: {key!r} is not allowed, it must be a key, for example views.set")
    words = [str(value) for value in values if isinstance(value, str | int | float)] if isinstance(values, list) else []
    if not words or len(set(words)) < len(values) or not _are_folders(words):
        allowed = "it must be a list of different plain values"
        raise UsageError(f"sweep.values in {name}: {values!r} is not allowed, {allowed}")
    if not _are_folders(configs):
        raise UsageError(f"sweep.configs in {name}: {', '.join(configs)}: labels must be names for folders")
    return configs, Axis(key, tuple(values))


def _is_name(value):
    return isinstance(value, str) and value != ""


def _are_folders(names):
    return all(Path(name).name == name != ".." for name in names)
