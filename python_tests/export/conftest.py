"""Checkpoints as a run writes them, without the run."""

import pytest
import torch

from checkpoints import write_checkpoint
from iecl_fast.engine import build
from iecl_fast.engine.config import override, read_recipe, resolve


@pytest.fixture(scope="session")
def make_run(tmp_path_factory):
    """A run folder with a checkpoint, and the backbone that is in it, for a recipe and overrides."""

    def make(recipe="digits_moco", *overrides):
        small = ("encoder.width=2", "method.dim=8", "trainer.batch_size=8")
        config = resolve(override(read_recipe(recipe), (*small, *overrides)))
        torch.manual_seed(0)
        method = build.method(config, total_steps=1, batch_size=8, num_images=24)
        size = config.views["image_size"]
        method([torch.randn(8, 3, size, size) for _ in range(method.num_views)], torch.arange(8))  # moves statistics
        folder = tmp_path_factory.mktemp("run")
        (folder / "checkpoints").mkdir()
        write_checkpoint(folder / "checkpoints" / "last.ckpt", config, method, samples=24, step=7)
        return folder, method.backbone.eval()

    return make


@pytest.fixture(scope="session")
def small_run(make_run):
    """Of a ResNet-18 of width 2; nobody writes into its folder."""
    return make_run()
