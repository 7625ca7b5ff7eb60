"""A checkpoint of a small untrained encoder, and class folders to evaluate it on."""

import pytest
import torch
from PIL import Image

from checkpoints import write_checkpoint
from iecl_fast.engine import build
from iecl_fast.engine.config import resolve


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """As a run on 48 digits leaves it, MoCo with a ResNet-18 of width 2, before its first step."""
    return untrained(tmp_path_factory, {"name": "moco", "dim": 8, "num_keys": 32})


@pytest.fixture(scope="session")
def cmc_checkpoint(tmp_path_factory):
    """The same of CMC, whose encoder looks at colours."""
    return untrained(tmp_path_factory, {"name": "cmc", "dim": 8, "num_samples": 16})


def untrained(tmp_path_factory, options):
    path = tmp_path_factory.mktemp("checkpoint") / "last.ckpt"
    mapping = {
        "method": options,
        "encoder": {"stem": "imagenet", "width": 2},
        "data": {"name": "digits", "limit": 48},
        "trainer": {"batch_size": 8, "threads": 1, "progress": False},
        "evaluate": {"linear_iterations": 20},
    }
    config = resolve(mapping)
    torch.manual_seed(0)
    method = build.method(config, total_steps=1, batch_size=8, num_images=48)
    write_checkpoint(path, config, method, samples=48)
    return path


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Two trees whose classes are told apart by their brightness: of two and of three classes."""
    root = tmp_path_factory.mktemp("folders")
    trees = {
        "pairs": ({"dark": 30, "light": 200}, "test"),
        "triples": ({"a": 20, "b": 110, "c": 220}, "val"),
    }
    for tree, (levels, second_part) in trees.items():
        for part, count in (("train", 8), (second_part, 3)):
            for name, level in levels.items():
                folder = root / tree / part / name
                folder.mkdir(parents=True)
                for number in range(count):
                    Image.new("RGB", (20, 24), (level, level + number, 255 - level)).save(folder / f"{number}.png")
    return root
