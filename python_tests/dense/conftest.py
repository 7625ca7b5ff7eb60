"""The tiny data sets, made once for all tests: they are only read."""

import pytest
from lightning_fabric import Fabric

from dense import shapes


@pytest.fixture(scope="session")
def voc_folder(tmp_path_factory):
    return shapes.make_voc(tmp_path_factory.mktemp("dense") / "voc")


@pytest.fixture(scope="session")
def coco_folder(tmp_path_factory):
    return shapes.make_coco(tmp_path_factory.mktemp("dense") / "coco")


@pytest.fixture
def fabric():
    return Fabric(accelerator="cpu", devices=1)
