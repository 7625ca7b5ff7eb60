"""A run's configuration: read from a YAML recipe and dotted overrides, checked, written out in full.

Every value has a default and every key is known: a misspelt one is refused, with the nearest that exists. What a run
used is kept in full, so that one file says everything about it. `settings` holds the groups. Two groups take their keys
from elsewhere: ``method`` from the arguments of ``METHODS[method.name]``, ``views`` from those of
`iecl_fast.data.training_transform`; a view option that is not given is the data set's own.
"""

import dataclasses
import inspect
import json
import typing
from importlib import resources
from pathlib import Path

import yaml

from iecl_fast.data import DATASETS, dataset_info, training_transform, view_options
from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.schema import allows_null, convert, did_you_mean
from iecl_fast.engine.settings import GROUPS, MAY_DIFFER, PARTS, Config, Seed
from iecl_fast.ssl import METHODS, accepts

DEFAULT_RECIPE = "digits"

# Arguments of methods that are no options: parts, which are groups of their own, and what the engine knows.
SUPPLIED = (*PARTS, "num_images", "steps_per_epoch")


def recipes():
    """Names of the packaged recipes."""
    folder = resources.files("iecl_fast").joinpath("recipes")
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def read_recipe(name):
    """The nested mapping of a YAML file, or of a packaged recipe.

    ``base: NAME`` in it names a packaged recipe whose values it goes over.

    Raises:
        UsageError: no such file or recipe, unreadable, not YAML, or not a mapping.
    """
    mapping = _read_mapping(name)
    base = mapping.pop("base", None)
    if base is None:
        return mapping
    if base not in recipes():
        raise UsageError(f"base: {base!r} in {name} is not allowed, it must be a recipe{did_you_mean(base, recipes())}")
    return merge(read_recipe(base), mapping)


def _read_mapping(name):
    if name in recipes():
        text = resources.files("iecl_fast").joinpath("recipes", f"{name}.yaml").read_text()
    else:
        path = Path(name)
        if not path.is_file():
            raise UsageError(
                f"--config: there is no file {name}, nor a recipe of that name{did_you_mean(name, recipes())}; "
                f"the recipes are {', '.join(recipes())}"
            )
        text = path.read_text(errors="replace")
    return parse_yaml(text, name)


def parse_yaml(text, source):
    """The mapping in a YAML text, {} in an empty one; `source` names it in a `UsageError`."""
    try:
        mapping = _load_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from None
    if mapping is None:
        return {}
    if not isinstance(mapping, dict):
        raise UsageError(f"{source} must hold a mapping of keys to values, not {type(mapping).__name__}")
    return mapping


def parse_override(text):
    """``"group.key=value"`` as a nested mapping; the value is read as YAML."""
    key, equals, value = text.partition("=")
    parts = key.split(".")
    if not equals or not all(part.isidentifier() for part in parts):
        raise UsageError(f"{text!r} is not an override; write group.key=value, for example trainer.epochs=10")
    try:
        nested = _load_yaml(value)
    except (yaml.YAMLError, ValueError):
        raise UsageError(f"{key}: {value!r} is not a YAML value") from None
    for part in reversed(parts):
        nested = {part: nested}
    return nested


def _load_yaml(text):
    """What a YAML text holds. Nesting without end, as of an alias for a group around it, is a ValueError."""
    try:
        value = yaml.safe_load(text)
        flatten({"": value})
    except RecursionError:
        raise ValueError("its groups are nested too deeply") from None
    return value


def merge(base, layer):
    """`base` with the values of `layer` over it, group by group. Neither is changed."""
    merged = dict(base)
    for key, value in layer.items():
        both_groups = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both_groups else value
    return merged


def override(mapping, texts):
    """`mapping` with each of some overrides ``"group.key=value"`` over it, in turn. It is not changed."""
    for layer in [parse_override(text) for text in texts]:
        mapping = merge(mapping, layer)
    return mapping


def for_method(mapping, name):
    """A recipe's mapping with another method in place of its own.

    Of the recipe's method options those are kept that the other method has too, and a ring or a SAIB only where it
    takes one. With a memory bank against without, momentum and temperature are of something else: then none are kept.
    Neither is changed.
    """
    method = mapping.get("method") or {}
    old = method.get("name", "moco") if isinstance(method, dict) else None
    if name not in METHODS or not isinstance(old, str) or old not in METHODS or name == old:
        return merge(mapping, {"method": {"name": name}})
    lost = _keyword_arguments(METHODS[old].__init__).keys() - _keyword_arguments(METHODS[name].__init__).keys()
    alike = accepts(name, "num_images") == accepts(old, "num_images")
    kept = {key: value for key, value in method.items() if alike and key not in lost}
    parts = {part: None for part in PARTS if not accepts(name, part)}
    return mapping | {"method": kept | {"name": name}} | parts


def resolve(mapping):
    """A nested mapping, with every missing value filled in, as a `Config`.

    Raises:
        UsageError: an unknown key, with the nearest known one, or a value that its key does not allow.
    """
    groups = ("method", "views", *GROUPS)
    empty = [key for key in groups if key not in PARTS and mapping.get(key) is None]  # ring: null says something
    mapping = mapping | {key: {} for key in empty}
    for group in groups:
        if not isinstance(mapping.get(group), dict | None):
            raise UsageError(f"{group}: {mapping[group]!r} is not allowed, {group} is a group: write {group}.KEY=VALUE")
    method_name = convert(mapping["method"].get("name", "moco"), typing.Literal[tuple(METHODS)], "method.name")
    options = _keyword_arguments(METHODS[method_name].__init__)
    declared = {
        "method": {"name": str} | {name: hint for name, (hint, _) in options.items()},
        "views": {name: hint for name, (hint, _) in _keyword_arguments(training_transform).items()},
    }
    _refuse_unknown_keys(mapping, declared)

    groups = {name: _group(cls, mapping.get(name), name) for name, cls in GROUPS.items()}
    data = groups["data"] = _absolute(groups["data"])
    defaults = {name: default for name, (_, default) in options.items()}
    method = {"name": method_name, **defaults, **_options(declared, mapping, "method")}
    config = Config(
        method=method,
        views=_with_views_of_data(data, _options(declared, mapping, "views")),
        seed=convert(mapping.get("seed", 0), Seed, "seed"),
        output=convert(mapping.get("output"), str | None, "output"),
        **groups,
    )
    _check_together(config)
    return config


def _keyword_arguments(function):
    """Type and default of each keyword argument of a function, except those that the engine supplies."""
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    options = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in SUPPLIED]
    return {p.name: (hints[p.name], p.default) for p in options}


def _options(declared, mapping, group):
    """The values given for a group whose keys are arguments; null stands for the default, unless it is a value."""
    hints = declared[group]
    given = {k: value for k, value in mapping[group].items() if value is not None or allows_null(hints[k])}
    return {key: convert(value, hints[key], f"{group}.{key}") for key, value in given.items()}


def _group(cls, mapping, name):
    """An instance of a group's dataclass, or None for a part that is left out."""
    if mapping is None:
        return None
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {field.name: mapping.get(field.name, field.default) for field in dataclasses.fields(cls)}
    return cls(**{key: convert(value, hints[key], f"{name}.{key}") for key, value in values.items()})


def _refuse_unknown_keys(mapping, declared):
    fields = {name: [field.name for field in dataclasses.fields(cls)] for name, cls in GROUPS.items()} | declared
    known = ["seed", "output", *(f"{group}.{key}" for group, keys in fields.items() for key in keys)]
    groups_alone = [*fields, "seed", "output"]
    for key in flatten(mapping):
        if key in known or key in groups_alone:
            continue
        same_last_part = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
        hint = f"; did you mean {same_last_part[0]}?" if same_last_part else did_you_mean(key, known)
        raise UsageError(f"there is no key {key}{hint}")


def _absolute(data):
    """A data folder by its full path, so that a run can be resumed and evaluated from anywhere."""
    is_folder = data.name not in DATASETS and Path(data.name).is_dir()
    return dataclasses.replace(data, name=str(Path(data.name).resolve())) if is_folder else data


def _with_views_of_data(data, options):
    """The given view options over those of the data set."""
    try:
        info = dataset_info(data.name, root=data.root)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from None
    views = view_options(info, **options)
    try:
        training_transform(**views)
    except (ValueError, TypeError) as error:
        raise UsageError(f"views: {error}") from None
    return views


def _check_together(config):
    """What a single value cannot tell."""
    method = config.method["name"]
    for part in PARTS:
        if getattr(config, part) is not None and not accepts(method, part):
            able = ", ".join(name for name in METHODS if accepts(name, part))
            raise UsageError(f"{part}: {method} takes no {part}; write {part}=null, or choose one of {able}")
    if config.saib is not None and config.views["image_size"] % config.saib.patch_size_for(config.views["image_size"]):
        raise UsageError(
            f"saib.patch_size: {config.saib.patch_size} is not allowed, it must divide views.image_size="
            f"{config.views['image_size']}"
        )
    if config.schedule.warmup_epochs >= config.trainer.epochs:
        raise UsageError(
            f"schedule.warmup_epochs: {config.schedule.warmup_epochs} is not allowed, it must be below "
            f"trainer.epochs={config.trainer.epochs}"
        )
    overrides = config.evaluate.linear_overrides()
    if config.evaluate.linear == "lbfgs" and overrides:
        name, value = next(iter(overrides.items()))
        raise UsageError(
            f"evaluate.linear_{name}: {value!r} is not allowed with evaluate.linear=lbfgs, it belongs to SGD: choose "
            f"evaluate.linear=iecl or ring"
        )
    if config.schedule.name == "step" and not config.schedule.milestones:
        raise UsageError("schedule.milestones: the step schedule needs some, for example [120,160]")


def differences(saved, wanted):
    """Keys whose values differ between two configurations and that a resumed run may not change.

    Args:
        saved, wanted: what `Config.to_dict` gives.

    Returns:
        list of (dotted key, saved value, wanted value).
    """
    saved, wanted = flatten(saved), flatten(wanted)
    missing = "(not set)"
    pairs = {key: (saved.get(key, missing), wanted.get(key, missing)) for key in [*saved, *wanted]}
    return [(key, old, new) for key, (old, new) in pairs.items() if old != new and key not in MAY_DIFFER]


def describe_keys():
    """A line ``key=value`` for each value of the default recipe."""
    values = flatten(resolve(read_recipe(DEFAULT_RECIPE)).to_dict())
    return [f"{key}={'null' if value is None else json.dumps(value)}".replace('"', "") for key, value in values.items()]


def flatten(mapping, prefix=""):
    """Nested groups as one dict from dotted key to value; an empty group is a value."""
    flat = {}
    for key, value in mapping.items():
        is_group = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{key}.") if is_group else {f"{prefix}{key}": value}
    return flat
