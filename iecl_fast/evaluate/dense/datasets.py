"""Images with their annotations as tensors, for training in random versions that a seed decides."""

import numpy as np
import torch
from PIL import Image
from pycocotools import mask as run_lengths
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as transforms

from iecl_fast.data.torchvision_sources import load_image
from iecl_fast.engine.batches import mixed_seed
from iecl_fast.evaluate.dense.voc import UNLABELLED


class DetectionImages(Dataset):
    """Images with boxes, and masks or keypoints where the data has them.

    Items are (image (3, H, W) float32 in 0..1, target). A target has boxes (n, 4) float32, labels (n,) int64, masks
    (n, H, W) uint8, keypoints (n, K, 3) float32. Images have their own sizes: torchvision's models resize them.

    Args:
        annotated: `Annotated` of `Objects`.
        training: leave out crowds and images in which nothing is left to learn. Otherwise nothing is left out, and
            targets also have iscrowd (n,) int64, the objects of which detections are ignored, and area (n,) float32.
        flip: mirror every second image, each epoch others.
        seed: of that.
    """

    def __init__(self, annotated, *, training, flip=False, seed=0):
        self.training, self.flip, self.seed, self.epoch = training, flip, seed, 0
        self.images = [image for image in annotated.images if not training or _teaches(image)]
        self.mirrored_keypoints = _mirrored(annotated.keypoint_names or ())

    def set_epoch(self, epoch):
        """From now on the random changes are those of that epoch."""
        self.epoch = epoch

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        objects = self.images[index]
        image = transforms.to_dtype(_read_rgb(objects.image), torch.float32, scale=True)
        target = self._target(objects)
        if self.flip and torch.rand((), generator=_generator(self.seed, self.epoch, index)) < 0.5:
            image, target = transforms.horizontal_flip(image), self._mirror(target, objects.width)
        return image, target

    def _target(self, objects):
        kept = [row for row, taught in enumerate(objects.taught) if taught or not self.training]
        size = (objects.height, objects.width)
        target = {
            "boxes": torch.tensor([objects.boxes[row] for row in kept], dtype=torch.float32).reshape(-1, 4),
            "labels": torch.tensor([objects.labels[row] for row in kept], dtype=torch.int64),
        }
        if objects.masks is not None:
            masks = [_decode(objects.masks[row], size) for row in kept]
            target["masks"] = torch.from_numpy(np.stack(masks) if masks else np.zeros((0, *size), np.uint8))
        if objects.keypoints is not None:
            points = torch.tensor([objects.keypoints[row] for row in kept], dtype=torch.float32)
            target["keypoints"] = points.reshape(len(kept), len(self.mirrored_keypoints), 3)
        if not self.training:
            target["iscrowd"] = torch.tensor([objects.ignored[row] for row in kept], dtype=torch.int64)
            target["area"] = torch.tensor([objects.areas[row] for row in kept], dtype=torch.float32)
        return target

    def _mirror(self, target, width):
        mirrored = dict(target)
        left, upper, right, lower = target["boxes"].unbind(dim=1)
        mirrored["boxes"] = torch.stack([width - right, upper, width - left, lower], dim=1)
        if "masks" in target:
            mirrored["masks"] = target["masks"].flip(-1)
        if "keypoints" in target:
            points = target["keypoints"][:, self.mirrored_keypoints].clone()
            points[..., 0] = width - points[..., 0]
            points[points[..., 2] == 0] = 0  # what is not there stays at COCO's place for it
            mirrored["keypoints"] = points
        return mirrored


class SegmentationImages(Dataset):
    """Images with a class for each pixel: (image (3, H, W) float32, standardised; mask (H, W) int64, 255 for none).

    Args:
        annotated: `Annotated` of (image file, mask file, whether a pixel has a class).
        mean, std: of the standardisation, per channel.
        crop_size: side of a training crop, of the images that have something to learn; None gives all images, whole, in
            their own size, without random changes.
        scale: least and greatest factor of the resizing before a crop. Crops beyond the image's edge hold the mean,
            and 255.
        flip: mirror every second image.
        seed: of all that.
    """

    def __init__(self, annotated, *, mean, std, crop_size=None, scale=(1.0, 1.0), flip=False, seed=0):
        self.images = [(image, mask) for image, mask, teaches in annotated.images if teaches or crop_size is None]
        self.mean, self.std = mean, std
        self.crop_size, self.scale, self.flip, self.seed, self.epoch = crop_size, scale, flip, seed, 0

    def set_epoch(self, epoch):
        """From now on the random changes are those of that epoch."""
        self.epoch = epoch

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image_file, mask_file = self.images[index]
        image = transforms.normalize(
            transforms.to_dtype(_read_rgb(image_file), torch.float32, scale=True), list(self.mean), list(self.std)
        )
        with Image.open(mask_file) as opened:
            mask = tv_tensors.Mask(torch.from_numpy(np.array(opened)))
        if self.crop_size is not None:
            image, mask = self._random_crop(image, mask, _generator(self.seed, self.epoch, index))
        return image, mask.as_subclass(torch.Tensor).long()

    def _random_crop(self, image, mask, generator):
        low, high = self.scale
        flipped, factor, down, across = torch.rand(4, generator=generator).tolist()
        if self.flip and flipped < 0.5:
            image, mask = transforms.horizontal_flip(image), transforms.horizontal_flip(mask)
        size = [max(1, round(side * (low + factor * (high - low)))) for side in image.shape[-2:]]
        image, mask = transforms.resize(image, size, antialias=True), transforms.resize(mask, size)
        # left, upper, right, lower
        padding = [0, 0, max(0, self.crop_size - size[1]), max(0, self.crop_size - size[0])]
        image, mask = transforms.pad(image, padding, fill=0), transforms.pad(mask, padding, fill=UNLABELLED)
        upper, left = (
            int(place * (side - self.crop_size + 1)) for place, side in zip((down, across), image.shape[-2:])
        )
        window = (upper, left, self.crop_size, self.crop_size)
        return transforms.crop(image, *window), transforms.crop(mask, *window)


def _teaches(objects):
    """Whether there is something to learn in an image: with keypoints, one that is there."""
    taught = [row for row, taught in enumerate(objects.taught) if taught]
    if objects.keypoints is None:
        return bool(taught)
    return any(point[2] > 0 for row in taught for point in objects.keypoints[row])


def _decode(mask, size):
    """Polygons or run lengths as a mask (height, width) of uint8."""
    encoded = run_lengths.frPyObjects(mask, *size)
    return run_lengths.decode(run_lengths.merge(encoded) if isinstance(encoded, list) else encoded)


def _mirrored(names):
    """For each keypoint the number of the one that it becomes in a mirror."""
    others = [name.replace("left", "right") if "left" in name else name.replace("right", "left") for name in names]
    return [names.index(other) if other in names else number for number, other in enumerate(others)]


def as_lists(items):
    """Collates items whose tensors have different sizes: a list of images and a list of targets."""
    images, targets = zip(*items)
    return list(images), list(targets)


def _read_rgb(file):
    """An image file as (3, H, W) uint8."""
    return transforms.pil_to_tensor(load_image(file))


def _generator(seed, epoch, index):
    return torch.Generator().manual_seed(mixed_seed(mixed_seed(seed, epoch), index))
