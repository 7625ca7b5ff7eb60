"""Sets of augmentations: each leaves out what it says, and nothing else."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from iecl_fast.data import training_transform
from iecl_fast.engine import build
from iecl_fast.engine.config import merge, read_recipe, resolve
from iecl_fast.engine.errors import UsageError

ALL = {
    "image_size": 16,
    "mean": (0.0,) * 3,
    "std": (1.0,) * 3,
    "rotate": 30.0,
    "flip": 1.0,
    "jitter": (0.8, 0.0, 0.0, 0.0),
    "jitter_probability": 1.0,
    "gray": 1.0,
    "blur": 1.0,
}
WITHOUT = {
    "full": {},
    "no_gray": {"gray": 0.0},
    "no_color": {"gray": 0.0, "jitter_probability": 0.0},
    "crop_only": {"gray": 0.0, "jitter_probability": 0.0, "blur": 0.0, "flip": 0.0, "rotate": 0.0},
}


@pytest.mark.parametrize("name", WITHOUT)
def test_a_set_is_the_same_as_those_probabilities_at_zero(name):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8))
    views = {}
    for way, options in (("set", ALL | {"set": name}), ("zero", ALL | WITHOUT[name]), ("full", ALL)):
        torch.manual_seed(0)
        views[way] = training_transform(**options)(image)
    assert torch.equal(views["set"], views["zero"])
    assert torch.equal(views["set"], views["full"]) == (name == "full")
    grey = torch.equal(views["set"][0], views["set"][1])
    assert grey == (name == "full")


def test_the_sets_that_there_are():
    with pytest.raises(ValueError, match="set = 'none' is not allowed: one of full, no_gray, no_color, crop_only"):
        training_transform(**ALL, set="none")
    with pytest.raises(UsageError, match=r"views\.set: 'no_colour' is not allowed, .*; did you mean no_color\?"):
        resolve({"views": {"set": "no_colour"}})


def test_a_run_keeps_the_values_that_its_set_leaves_out():
    """So that the set can be changed again, and config.yaml says what was reduced."""
    config = resolve(merge(read_recipe("iecl_cifar10"), {"views": {"set": "crop_only", "gray": 0.3}}))
    assert (config.views["set"], config.views["gray"], config.views["flip"]) == ("crop_only", 0.3, 0.5)
    assert resolve(config.to_dict()) == config
    steps = build.training_views(resolve({"views": {"set": "crop_only"}})).transform.transforms
    assert [type(step) for step in steps[:-3]] == [v2.RandomResizedCrop]


def test_evaluation_does_not_depend_on_the_set():
    """A probe of the feature map learns from cropped and mirrored images whatever the encoder has seen."""
    mapping = {"views": {"set": "crop_only", "flip": 0.5}, "evaluate": {"linear": "ring"}}
    steps = build.probe_views(resolve(mapping)).transform.transforms
    assert [type(step) for step in steps[:-3]] == [v2.RandomRotation, v2.RandomResizedCrop, v2.RandomHorizontalFlip]
