import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10, STL10

from iecl_fast.data import balanced_rows, build_dataset, dataset_info, default_root, evaluation_transform
from iecl_fast.data.torchvision_sources import load_image

CIFAR_FOLDER = Path("/tmp/cifar10")


@pytest.fixture
def tree(tmp_path):
    """train/ with three classes, test/ without the second of them; the grey value is the label, times 40."""
    for part, classes, count in (("train", "abc", 4), ("test", "ac", 2)):
        for name in classes:
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("L", (20, 16), 40 * "abc".index(name)).save(folder / f"{number}.png")
    return tmp_path


def checksum(dataset):
    return hashlib.sha256(b"".join(image.tobytes() for image, _ in dataset)).hexdigest()


def test_digits_split_is_fixed_and_disjoint():
    train, test = build_dataset("digits"), build_dataset("digits", split="test")
    assert (len(train), len(test)) == (1297, 500)
    assert train[0][0].size == (32, 32) and train[0][0].mode == "RGB"
    assert train.labels[:12].tolist() == [2, 1, 2, 5, 1, 5, 9, 3, 0, 5, 9, 3]
    assert test.labels[:12].tolist() == [4, 8, 8, 3, 9, 0, 6, 3, 9, 8, 4, 5]
    assert torch.bincount(test.labels).tolist() == [50, 51, 49, 51, 50, 51, 50, 50, 48, 50]
    assert [label for _, label in test] == test.labels.tolist()
    assert checksum(build_dataset("digits", split="pretrain")) == checksum(train)
    seen = {image.tobytes() for image, _ in train}
    assert sum(image.tobytes() in seen for image, _ in test) == 0


def test_digits_statistics_are_those_stated():
    info = dataset_info("digits")
    pixels = np.stack([np.asarray(image) for image, _ in build_dataset("digits")]) / 255
    assert pixels.mean(axis=(0, 1, 2)) == pytest.approx(info.mean, abs=1e-4)
    assert pixels.std(axis=(0, 1, 2)) == pytest.approx(info.std, abs=1e-4)
    assert (info.num_classes, info.image_size) == (10, 32)


def test_transform_is_applied():
    info = dataset_info("digits")
    transform = evaluation_transform(image_size=info.image_size, mean=info.mean, std=info.std)
    image, label = build_dataset("digits", transform=transform)[3]
    assert image.shape == (3, 32, 32) and type(label) is int


def test_class_folders(tree):
    train, test = build_dataset(str(tree)), build_dataset(str(tree), split="test")
    assert train.classes == test.classes == ["a", "b", "c"]
    assert train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert test.labels.tolist() == [0, 0, 2, 2]  # the class without test images shifts no label
    image, label = test[3]
    assert image.mode == "RGB" and image.getpixel((0, 0)) == (80, 80, 80) and label == 2
    info = dataset_info(str(tree))
    assert (info.num_classes, info.image_size, info.crop_ratio) == (3, 16, 1.0)


def test_val_stands_in_for_test(tree):
    (tree / "test").rename(tree / "val")
    assert len(build_dataset(str(tree), split="test")) == 4


def test_large_photographs_get_224_pixels(tmp_path):
    (tmp_path / "train" / "a").mkdir(parents=True)
    Image.new("RGB", (300, 200)).save(tmp_path / "train" / "a" / "0.jpg")
    info = dataset_info(str(tmp_path))
    assert (info.image_size, info.crop_ratio) == (224, 0.875)


def test_imagenet_is_a_tree_below_the_root(tree):
    (tree / "imagenet").mkdir()
    (tree / "train").rename(tree / "imagenet" / "train")
    (tree / "test").rename(tree / "imagenet" / "val")
    assert len(build_dataset("imagenet", root=tree)) == 12
    assert len(build_dataset("imagenet", root=tree, split="test")) == 4
    with pytest.raises(FileNotFoundError, match=r"nowhere.imagenet.train.*image-net\.org"):
        build_dataset("imagenet", root=tree / "nowhere")


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "stl10"])
def test_missing_data_says_where_and_how(name, tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"{name} is not in .*looked for {tmp_path}.*data\.download=true"):
        build_dataset(name, root=tmp_path)


def test_failed_download_is_told(tmp_path, monkeypatch):
    def fail(self):
        raise OSError("no route to host")

    monkeypatch.setattr(CIFAR10, "download", fail)
    with pytest.raises(FileNotFoundError, match=r"cifar10 could not be downloaded to .*no route to host"):
        build_dataset("cifar10", root=tmp_path, download=True)


def test_cifar10_from_torchvisions_files(tmp_path, monkeypatch):
    """A tiny copy in torchvision's format; only its checksums are set aside."""
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (6, 20, 3072), dtype=np.uint8)
    names = [name for name, _ in CIFAR10.train_list + CIFAR10.test_list]
    for name, data in zip(names, images, strict=True):
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": [i % 10 for i in range(20)]}))
    (folder / CIFAR10.meta["filename"]).write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)

    train, test = build_dataset("cifar10", root=tmp_path), build_dataset("cifar10", root=tmp_path, split="test")
    assert (len(train), len(test), train.classes) == (100, 20, list("abcdefghij"))
    assert train.labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    expected = images[5, 7].reshape(3, 32, 32).transpose(1, 2, 0)
    assert np.array_equal(np.asarray(test[7][0]), expected) and test[7][1] == 7


def test_stl10_pretrains_on_the_unlabelled_images_too(tmp_path, monkeypatch):
    folder = tmp_path / STL10.base_folder
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (9, 3 * 96 * 96), dtype=np.uint8)
    for name, rows in (("train", pixels[:3]), ("test", pixels[3:5]), ("unlabeled", pixels[5:])):
        rows.tofile(folder / f"{name}_X.bin")
        if name != "unlabeled":
            np.arange(1, 1 + len(rows), dtype=np.uint8).tofile(folder / f"{name}_y.bin")
    (folder / "class_names.txt").write_text("\n".join("abcdefghij"))
    monkeypatch.setattr(STL10, "_check_integrity", lambda self: True)

    by_split = {split: build_dataset("stl10", root=tmp_path, split=split) for split in ("pretrain", "train", "test")}
    assert {split: len(dataset) for split, dataset in by_split.items()} == {"pretrain": 7, "train": 3, "test": 2}
    assert by_split["pretrain"].labels.tolist() == [0, 1, 2, -1, -1, -1, -1]
    assert by_split["test"][1][1] == 1 and by_split["test"][1][0].size == (96, 96)
    assert len(build_dataset("stl10", root=tmp_path, split="pretrain", limit=5)) == 5


def test_root_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("IECL_FAST_DATA", str(tmp_path))
    assert default_root() == tmp_path
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        build_dataset("cifar100")
    monkeypatch.delenv("IECL_FAST_DATA")
    assert default_root().parts[-2:] == ("iecl_fast", "data")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "cifr10"}, "got 'cifr10'; did you mean cifar10?"),
        ({"name": "no/such/folder"}, "digits, cifar10, .*, pets, svhn or an existing folder"),
        ({"name": "digits", "split": "valid"}, "split must be one of pretrain, train, test, got 'valid'"),
        ({"name": "digits", "limit": 0}, r"limit must lie in 1\.\.1297, the number of images, got 0"),
        ({"name": "digits", "limit": 1298}, "got 1298"),
    ],
)
def test_errors_of_build_dataset(arguments, words):
    with pytest.raises(ValueError, match=words):
        build_dataset(**arguments)


def test_errors_about_folders(tree):
    with pytest.raises(ValueError, match="got 'cifar-10'"):
        dataset_info("cifar-10")
    (tree / "train" / "d").mkdir()  # without images it is no class
    assert build_dataset(str(tree)).classes == ["a", "b", "c"]
    for folder in ("d", ".ipynb_checkpoints"):
        (tree / "test" / folder).mkdir()
    assert len(build_dataset(str(tree), split="test")) == 4
    Image.new("L", (4, 4)).save(tree / "test" / "d" / "0.png")
    with pytest.raises(ValueError, match="test has images of classes that train/ has none of: d"):
        build_dataset(str(tree), split="test")
    (tree / "test").rename(tree / "held-out")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*test or .*val\. A data set's folder holds"):
        build_dataset(str(tree), split="test")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*a/train\. A data set"):
        build_dataset(str(tree / "train" / "a"))
    for image in tree.glob("train/*/*.png"):
        image.rename(image.with_suffix(".raw"))
    with pytest.raises(FileNotFoundError, match=r"there are no images in .*train/<class>/; known are \.jpg"):
        build_dataset(str(tree))


def test_limit_balances_the_classes_and_nests():
    dataset = build_dataset("digits", limit=105)
    assert sorted(torch.bincount(dataset.labels).tolist()) == [10] * 5 + [11] * 5
    assert torch.equal(dataset.labels, build_dataset("digits").labels[dataset.rows])
    assert dataset[17][1] == dataset.labels[17]
    smaller = build_dataset("digits", limit=50)
    assert set(smaller.rows.tolist()) < set(dataset.rows.tolist())


def test_limit_lets_large_classes_fill_up_and_takes_no_fixed_end():
    labels = torch.tensor([0] * 2 + [1] * 50)
    rows = balanced_rows(labels, 12)
    assert rows[:2].tolist() == [0, 1] and len(rows) == len(set(rows.tolist())) == 12
    assert rows[2:].tolist() != list(range(2, 12))
    assert torch.equal(balanced_rows(labels, 52), torch.arange(52))


@pytest.mark.skipif(not CIFAR_FOLDER.is_dir(), reason="needs the CIFAR-10 images unpacked")
def test_a_real_folder_tree():
    test = build_dataset(str(CIFAR_FOLDER), split="test", limit=30)
    assert torch.bincount(test.labels).tolist() == [3] * 10
    assert test[0][0].size == (32, 32) and test[0][0].mode == "RGB"
    assert dataset_info(str(CIFAR_FOLDER)).image_size == 32


def test_a_truncated_image_is_said_with_its_path(tmp_path):
    path = tmp_path / "cut.jpg"
    Image.effect_noise((64, 64), 50).convert("RGB").save(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(OSError, match=r"cut\.jpg: .*truncated"):
        load_image(str(path))


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bits_become_8(tmp_path, suffix):
    values = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(values).save(tmp_path / f"deep.{suffix}")
    image = load_image(tmp_path / f"deep.{suffix}")
    assert image.mode == "RGB"
    assert (np.asarray(image) == np.arange(256).reshape(16, 16, 1)).all()


@pytest.mark.parametrize(("kind", "mode"), [(np.float32, "F"), (np.int32, "I")])
def test_numbers_of_no_known_range_are_refused(tmp_path, kind, mode):
    Image.fromarray(np.ones((4, 4), kind)).save(tmp_path / "a.tif")
    with pytest.raises(OSError, match=rf"a\.tif: its pixels are numbers of no known range \(mode {mode}\)"):
        load_image(tmp_path / "a.tif")


@pytest.mark.parametrize("content", [b"", b"no image"])
def test_what_is_no_image_is_said_with_its_path(tmp_path, content):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(OSError, match=r"^.*a\.png: it is empty, damaged or no image$"):
        load_image(tmp_path / "a.png")


@pytest.mark.parametrize("mode", ["CMYK", "RGBA", "LA", "P", "1"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    suffix = "jpg" if mode == "CMYK" else "png"
    Image.new("L", (1, 1), 255).convert("RGB").convert(mode).save(tmp_path / f"a.{suffix}")
    image = load_image(tmp_path / f"a.{suffix}")
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (1, 1), (255, 255, 255))
