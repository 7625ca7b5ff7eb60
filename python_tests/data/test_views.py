import copy
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from iecl_fast.data import (
    DATASETS,
    GaussianBlur,
    ViewsDataset,
    build_dataset,
    dataset_info,
    evaluation_transform,
    training_transform,
    view_options,
)

PLAIN = {"image_size": 16, "mean": (0.0,) * 3, "std": (1.0,) * 3}
OFF = {"crop_scale": (1.0, 1.0), "flip": 0.0, "jitter_probability": 0.0, "gray": 0.0, "blur": 0.0}


def photograph(size=(40, 30)):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def all_views(dataset, **loader):
    return [view for views, _, _ in DataLoader(dataset, batch_size=8, **loader) for view in views]


@pytest.fixture(scope="module")
def digits():
    transform = training_transform(**view_options(dataset_info("digits")))
    return ViewsDataset(build_dataset("digits", limit=24), transform, num_views=2, seed=3)


def test_items(digits):
    views, label, index = digits[5]
    assert len(digits) == 24 and len(views) == 2
    assert all(view.shape == (3, 32, 32) and view.dtype == torch.float32 for view in views)
    assert label == int(digits.dataset.labels[5]) and index == 5
    assert not torch.equal(*views)
    batch, labels, indices = next(iter(DataLoader(digits, batch_size=4)))
    assert [tuple(view.shape) for view in batch] == [(4, 3, 32, 32)] * 2
    assert labels.dtype == indices.dtype == torch.int64 and indices.tolist() == [0, 1, 2, 3]


def test_same_views_whatever_the_order_and_the_generator(digits):
    forward = [digits[i][0] for i in range(4)]
    torch.manual_seed(99)
    backward = [digits[i][0] for i in (3, 2, 1, 0)][::-1]
    for one, other in zip(forward, backward, strict=True):
        assert torch.equal(torch.stack(one), torch.stack(other))


def test_same_views_whatever_the_number_of_workers(digits):
    alone = all_views(digits)
    for workers in (1, 2):
        assert all(torch.equal(a, b) for a, b in zip(alone, all_views(digits, num_workers=workers), strict=True))


def test_persistent_workers_follow_the_epoch(digits):
    dataset = copy.deepcopy(digits)
    loader = DataLoader(dataset, batch_size=8, num_workers=1, persistent_workers=True)
    for epoch in (0, 1):
        dataset.set_epoch(epoch)
        from_worker = [view for views, _, _ in loader for view in views]
        assert all(torch.equal(a, b) for a, b in zip(from_worker, all_views(dataset), strict=True))


def test_seed_and_epoch_and_index_each_change_the_draw(digits):
    other_seed = ViewsDataset(digits.dataset, digits.transform, seed=4)
    other_epoch = copy.deepcopy(digits)
    other_epoch.set_epoch(1)
    same_image = ViewsDataset([digits.dataset[0]] * 2, digits.transform, seed=3)
    view = digits[0][0][0]
    assert torch.equal(same_image[0][0][0], view)
    for changed in (other_seed[0], other_epoch[0], same_image[1]):
        assert not torch.equal(changed[0][0], view)
    other_epoch.set_epoch(0)
    assert torch.equal(other_epoch[0][0][0], view)


def test_the_generator_is_left_as_it_was(digits):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    digits[0]
    assert torch.equal(torch.rand(3), expected)

    def broken(image):
        torch.rand(1)
        raise RuntimeError("broken")

    torch.manual_seed(5)
    with pytest.raises(RuntimeError, match="broken"):
        ViewsDataset(digits.dataset, broken)[0]
    assert torch.equal(torch.rand(3), expected)


def test_pickles_for_spawned_workers(digits):
    digits.set_epoch(7)
    other = pickle.loads(pickle.dumps(digits))
    assert torch.equal(other[2][0][1], digits[2][0][1])
    digits.set_epoch(0)


def test_everything_off_is_the_resized_image():
    view = training_transform(**PLAIN, **OFF)(photograph((16, 16)))
    expected = torch.from_numpy(np.asarray(photograph((16, 16))).copy()).permute(2, 0, 1) / 255
    torch.testing.assert_close(view, expected)


def test_views_are_standardised():
    options = {"image_size": 16, "mean": (0.5, 0.4, 0.3), "std": (0.1, 0.2, 0.3)}
    image = Image.new("RGB", (20, 20), (255, 0, 51))
    expected = torch.tensor([5.0, -2.0, -1 / 3])[:, None, None].expand(3, 16, 16)
    torch.testing.assert_close(training_transform(**options, **OFF)(image), expected)
    torch.testing.assert_close(evaluation_transform(**options)(image), expected)


def test_each_option_does_what_it_says():
    image = photograph((16, 16))
    plain = training_transform(**PLAIN, **OFF)(image)

    def view(**options):
        return training_transform(**PLAIN, **{**OFF, **options})(image)

    assert torch.equal(view(flip=1.0), plain.flip(2))
    grey = view(gray=1.0)
    assert torch.equal(grey[0], grey[1]) and torch.equal(grey[1], grey[2]) and not torch.equal(grey, plain)
    blurred = view(blur=1.0)
    assert blurred.diff(dim=2).abs().mean() < plain.diff(dim=2).abs().mean()
    rotated = view(rotate=90.0)
    assert not torch.equal(rotated, plain) and rotated.mean() < plain.mean()  # black corners
    brighter = torch.stack([view(jitter=(0.8, 0.0, 0.0, 0.0), jitter_probability=1.0).mean() for _ in range(20)])
    assert brighter.min() < 0.8 * plain.mean() and brighter.max() > 1.2 * plain.mean()
    assert torch.equal(view(jitter=(0.0,) * 4, jitter_probability=1.0), plain)


def test_crops_cover_the_stated_area():
    # On a ramp the least and greatest values tell the crop's extent.
    ramp = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (256, 1))).convert("RGB")
    transform = training_transform(**PLAIN, **{**OFF, "crop_scale": (0.04, 0.25)})
    views = torch.stack([transform(ramp) for _ in range(60)]).flatten(1)
    extents = views.amax(dim=1) - views.amin(dim=1)
    # A width of sqrt(area * ratio), ratio in 3/4..4/3; resampling takes a little off.
    assert extents.max() < (0.25 * 4 / 3) ** 0.5 + 0.01 and extents.min() > (0.04 * 3 / 4) ** 0.5 - 0.04
    assert extents.max() - extents.min() > 0.15


def test_blur_draws_its_radius_from_the_torch_generator():
    blur, image = GaussianBlur((0.5, 2.0)), photograph()
    torch.manual_seed(0)
    first = blur(image)
    second = blur(image)
    torch.manual_seed(0)
    assert blur(image).tobytes() == first.tobytes() != second.tobytes()


def test_evaluation_keeps_the_middle():
    image = Image.new("RGB", (400, 200))
    image.paste((255, 255, 255), (150, 50, 250, 150))  # a white square in the middle
    view = evaluation_transform(**{**PLAIN, "image_size": 100}, crop_ratio=0.5)(image)
    assert view.shape == (3, 100, 100) and view.min() == 1
    wide = evaluation_transform(**{**PLAIN, "image_size": 100})(image)
    assert wide[:, :, :20].max() == 0 and wide[0, 50, 50] == 1
    assert wide.mean() == pytest.approx(0.25, abs=0.02)


def test_options_are_moco_v2s_then_the_datasets_then_the_users():
    imagenet = view_options(DATASETS["imagenet"])
    assert (imagenet["crop_scale"], imagenet["jitter"], imagenet["blur"]) == ((0.2, 1.0), (0.4, 0.4, 0.4, 0.1), 0.5)
    digits = view_options(DATASETS["digits"], rotate=5.0)
    assert (digits["flip"], digits["rotate"], digits["image_size"]) == (0.0, 5.0, 32)
    for info in DATASETS.values():
        options = view_options(info, image_size=24)
        assert training_transform(**options)(photograph()).shape == (3, 24, 24)
    with pytest.raises(TypeError, match=r"no option 'flipp'; they are image_size, mean"):
        view_options(DATASETS["digits"], flipp=0.5)
