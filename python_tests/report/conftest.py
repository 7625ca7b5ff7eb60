"""Runs small enough for a test: two methods on a folder of images whose class names are full of markup, and a sweep."""

import json
import shutil
import sys

import pytest
import yaml

from class_folders import make_class_folders
from iecl_fast.cli import main

CLASSES = {"<b>dark": 30, 'grey & "fog"': 120, "light": 210}
TINY = [
    "encoder.stem=imagenet",
    "encoder.width=2",
    "method.dim=8",
    "method.num_keys=16",
    "trainer.threads=1",
    "trainer.log_steps=1",
    "trainer.progress=false",
    "evaluate.linear_iterations=10",
]


@pytest.fixture(scope="package")
def images(tmp_path_factory):
    return make_class_folders(tmp_path_factory.mktemp("data") / "images", CLASSES, {"train": 8, "test": 6})


@pytest.fixture(scope="package")
def runs(tmp_path_factory, images):
    """Folder with finished runs: iecl, moco, and sweep/warm/seed<number>, which are copies with other accuracies."""
    root = tmp_path_factory.mktemp("runs")

    def train(name, *words):
        arguments = ["--data", str(images), "--epochs", "2", "--batch-size", "8", "--output", str(root / name), *words]
        assert main(["pretrain", *arguments, *TINY]) == 0

    train("iecl", "method.hidden_dim=8", "method.jacobian_steps=2")
    train("moco", "--config", "digits_moco", "ring=null")
    for seed, accuracy in ((3, 0.5), (10, 0.75)):
        folder = shutil.copytree(root / "moco", root / "sweep" / "warm" / f"seed{seed}")
        for path, key, value in (("result.json", "knn_top1", accuracy), ("config.yaml", "seed", seed)):
            content = yaml.safe_load((folder / path).read_text())  # JSON is YAML
            (folder / path).write_text(json.dumps(content | {key: value}))
    return root


@pytest.fixture
def copy(runs, tmp_path):
    """A copy of a run that may be damaged: ``copy(name, new name)``."""
    return lambda name, new="copied": shutil.copytree(runs / name, tmp_path / new)


@pytest.fixture
def without_umap(monkeypatch):
    """As where umap-learn is not installed: t-SNE of a few points takes no time."""
    monkeypatch.setitem(sys.modules, "umap", None)


@pytest.fixture(scope="package")
def whole(runs, tmp_path_factory):
    """The page over all of the runs, its text."""
    target = tmp_path_factory.mktemp("page") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "umap", None)
        assert main(["report", *(str(runs / name) for name in ("iecl", "moco", "sweep")), "--output", str(target)]) == 0
    return target.read_text()


@pytest.fixture
def make_report(without_umap, tmp_path):
    """Run the command over folders; gives the page's text."""

    def make(*folders):
        target = tmp_path / "made" / "report.html"
        target.unlink(missing_ok=True)
        assert main(["report", *map(str, folders), "--output", str(target)]) == 0
        return target.read_text()

    return make
