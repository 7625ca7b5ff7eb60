"""Mean and deviation against numpy's, exact and in any order."""

import numpy as np
import pytest
import torch

from iecl_fast.data import build_dataset, channel_statistics, dataset_info, evaluation_transform, pixel_transform


def images(count=23):
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, 9, 7), dtype=np.uint8)
    pixels[:, 1] //= 3
    return torch.from_numpy(pixels)


@pytest.mark.parametrize("batch_size", [1, 5, 23])
def test_agrees_with_numpy_and_order_does_not_matter(batch_size):
    data = images()
    mean, std = channel_statistics(data.split(batch_size))
    values = data.numpy().astype(np.float64) / 255
    assert mean == pytest.approx(values.mean(axis=(0, 2, 3)), rel=1e-13)
    assert std == pytest.approx(values.std(axis=(0, 2, 3)), rel=1e-13)
    assert channel_statistics(data.flip(0).split(4)) == (mean, std)


def test_a_channel_without_spread_is_only_shifted():
    data = images()
    data[:, 2] = 51
    mean, std = channel_statistics([data])
    assert mean[2] == pytest.approx(0.2, rel=1e-15) and std[2] == 1.0 and std[0] < 0.5


def test_are_of_what_evaluation_sees():
    """With its own statistics a training set has mean 0 and deviation 1 for each channel."""
    size = {"image_size": 20, "crop_ratio": 0.875}
    pixels = build_dataset("digits", limit=50, transform=pixel_transform(**size))
    assert pixels[0][0].dtype == torch.uint8 and pixels[0][0].shape == (3, 20, 20)
    mean, std = channel_statistics(torch.stack([image for image, _ in pixels]).split(16))
    views = build_dataset("digits", limit=50, transform=evaluation_transform(**size, mean=mean, std=std))
    deviation, centre = torch.std_mean(torch.stack([image for image, _ in views]).double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(centre, torch.zeros(3).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(deviation, torch.ones(3).double(), atol=1e-6, rtol=0)


def test_agree_with_those_that_are_stated_for_the_digits():
    info = dataset_info("digits")
    pixels = build_dataset("digits", transform=pixel_transform(image_size=32))
    mean, std = channel_statistics(image[None] for image, _ in pixels)
    assert mean == pytest.approx(info.mean, abs=1e-4) and std == pytest.approx(info.std, abs=1e-4)
