"""Images as tensors: mirrored and cropped together with what is known of them, the same for the same seed."""

import numpy as np
import pytest
import torch
from PIL import Image

from dense import shapes
from iecl_fast.evaluate.dense import coco, voc
from iecl_fast.evaluate.dense.annotations import Annotated
from iecl_fast.evaluate.dense.datasets import DetectionImages, SegmentationImages
from iecl_fast.evaluate.dense.voc import UNLABELLED

NO_CHANGE = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def mirrored_and_plain(images, index=0):
    """An item as it is, and in an epoch in which it is mirrored."""
    plain, mirrored = images(flip=False)[index], images(flip=True)
    for epoch in range(20):
        mirrored.set_epoch(epoch)
        if not torch.equal(mirrored[index][0], plain[0]):
            return plain, mirrored[index]
    raise AssertionError("never mirrored in 20 epochs")


def test_boxes_masks_and_image_are_mirrored_together(coco_folder):
    annotated = coco.read_objects(coco_folder, ["train"], "mask_rcnn")
    (image, target), (other_image, other) = mirrored_and_plain(
        lambda flip: DetectionImages(annotated, training=True, flip=flip)
    )
    assert torch.equal(other_image, image.flip(-1))
    assert torch.equal(other["masks"], target["masks"].flip(-1))
    assert torch.equal(other["labels"], target["labels"])
    for box, mask in zip(other["boxes"], other["masks"]):
        x, y, width, height = shapes.box_of(mask.numpy())
        assert box.tolist() == [x, y, x + width, y + height]


def test_left_and_right_change_places_in_a_mirror(coco_folder):
    annotated = coco.read_objects(coco_folder, ["train"], "keypoint_rcnn")
    (_, target), (_, other) = mirrored_and_plain(lambda flip: DetectionImages(annotated, training=True, flip=flip))
    left, right = (other["boxes"][:, 0], other["boxes"][:, 2])
    assert torch.equal(other["keypoints"][:, 0, 0], left)
    assert torch.equal(other["keypoints"][:, 1, 0], right)
    assert torch.equal(other["keypoints"][:, 2, 0], shapes.WIDTH - target["keypoints"][:, 2, 0])
    assert torch.equal(other["keypoints"][..., 1:], target["keypoints"][..., 1:])


def test_a_point_that_is_not_there_stays_at_zero(coco_folder):
    annotated = coco.read_objects(coco_folder, ["train"], "keypoint_rcnn")
    for objects in annotated.images:
        for points in objects.keypoints:
            points[0] = (0, 0, 0)
    _, (_, other) = mirrored_and_plain(lambda flip: DetectionImages(annotated, training=True, flip=flip))
    assert torch.equal(other["keypoints"][:, 1], torch.zeros(2, 3))


@pytest.mark.parametrize("epoch", [0, 3])
def test_the_same_seed_and_epoch_give_the_same_crops(voc_folder, epoch):
    annotated = voc.read_masks(voc_folder, ["train"], shapes.CLASSES)

    def crops(seed):
        images = SegmentationImages(annotated, **NO_CHANGE, crop_size=48, scale=(0.5, 2.0), flip=True, seed=seed)
        images.set_epoch(epoch)
        return torch.stack([images[index][0] for index in range(len(images))])

    state = torch.get_rng_state()
    assert torch.equal(crops(1), crops(1))
    assert not torch.equal(crops(1), crops(2))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_mask_goes_where_the_image_goes(tmp_path):
    # The mask can be read off the image: its value is the red channel in tenths.
    values = np.random.default_rng(0).integers(0, 5, (6, 8)).repeat(16, 0).repeat(16, 1).astype(np.uint8)
    Image.fromarray(np.stack([values * 50] * 3, axis=2)).save(tmp_path / "image.png")
    Image.fromarray(values).save(tmp_path / "mask.png")
    annotated = Annotated([(tmp_path / "image.png", tmp_path / "mask.png", True)], tuple("abcd"))
    images = SegmentationImages(annotated, **NO_CHANGE, crop_size=112, scale=(0.5, 2.0), flip=True)
    padded, seen = 0, 0
    for epoch in range(12):
        images.set_epoch(epoch)
        image, mask = images[0]
        assert image.shape == (3, 112, 112)
        assert mask.shape == (112, 112)
        assert mask.dtype == torch.int64
        inside = mask != UNLABELLED
        padded += (~inside).sum().item()
        assert (image[:, ~inside] == 0).all()
        read = (image[0][inside] * 255 / 50).round().long()
        # Resizing blurs the edges between the blocks of 16 pixels, whose sides are 8 to 32 then.
        assert (read == mask[inside]).float().mean() > 0.7
        seen += inside.sum().item()
    assert padded > 0
    assert seen > 0


def test_test_images_are_whole_and_standardised(voc_folder):
    annotated = voc.read_masks(voc_folder, ["val"], shapes.CLASSES)
    plain, other = (
        SegmentationImages(annotated, **values)[0]
        for values in (NO_CHANGE, {"mean": (0.5, 0.25, 0.0), "std": (0.5, 0.25, 2.0)})
    )
    assert plain[0].shape == (3, shapes.HEIGHT, shapes.WIDTH)
    assert type(plain[0]) is type(plain[1]) is torch.Tensor
    mean, std = torch.tensor([0.5, 0.25, 0.0])[:, None, None], torch.tensor([0.5, 0.25, 2.0])[:, None, None]
    torch.testing.assert_close(other[0], (plain[0] - mean) / std)
    _, found = shapes.picture(12)
    for name, mask in found:
        assert (plain[1].numpy()[2:][mask[2:]] == shapes.CLASSES.index(name) + 1).all()
    assert (plain[1][:2] == UNLABELLED).all()


def test_a_truncated_image_names_its_file(voc_folder, tmp_path):
    source = voc_folder / "JPEGImages" / "000000.jpg"
    (tmp_path / "cut.jpg").write_bytes(source.read_bytes()[:-600])
    mask = voc_folder / "SegmentationClass" / "000000.png"
    annotated = Annotated([(tmp_path / "cut.jpg", mask, True)], shapes.CLASSES)
    with pytest.raises(OSError, match=r"cut\.jpg"):
        SegmentationImages(annotated, **NO_CHANGE)[0]
