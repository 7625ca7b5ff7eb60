"""torchvision's Faster, Mask and Keypoint R-CNN around a backbone of ours, with a feature pyramid or without."""

from collections import OrderedDict

from torch import nn
from torchvision.models.detection import FasterRCNN, KeypointRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from iecl_fast.evaluate.dense.backbone import Stages, measure_stages

MODELS = {"faster_rcnn": FasterRCNN, "mask_rcnn": MaskRCNN, "keypoint_rcnn": KeypointRCNN}
ASPECT_RATIOS = (0.5, 1.0, 2.0)
# Sides of anchors in strides of the features they stand on: with strides 4 .. 64, or with 16, 32 .. 512 pixels.
FPN_ANCHOR = 8
C4_ANCHORS = (2, 4, 8, 16, 32)
C4_PROPOSALS = {"rpn_pre_nms_top_n_train": 12000, "rpn_pre_nms_top_n_test": 6000}  # Detectron's, for its one level
MASK_CONVOLUTIONS, KEYPOINT_CONVOLUTIONS, BOX_CONVOLUTIONS = 4, 8, 4


class PyramidFeatures(nn.Module):
    """A feature pyramid over the four stages: images -> five maps of ``out_channels`` (Lin et al., 2017).

    Channels are read off the backbone.
    """

    def __init__(self, backbone, channels, norm):
        super().__init__()
        self.stages = Stages(backbone)
        widths = [width for width, _ in measure_stages(backbone)]
        self.pyramid = FeaturePyramidNetwork(widths, channels, extra_blocks=LastLevelMaxPool(), norm_layer=norm)
        self.out_channels = channels

    def forward(self, images):
        return self.pyramid(OrderedDict((str(number), output) for number, output in enumerate(self.stages(images))))


class ThirdStageFeatures(nn.Module):
    """The third stage's output, C4 in the papers' words: images -> one map of ``out_channels``."""

    def __init__(self, backbone):
        super().__init__()
        self.stages = Stages(backbone, first=3, last=3)
        self.out_channels = measure_stages(backbone)[2][0]

    def forward(self, images):
        return OrderedDict([("0", self.stages(images)[0])])


def build_detector(backbone, *, settings, num_classes, num_keypoints, mean, std):
    """A detector whose features come from a backbone.

    Args:
        backbone: `ResNetBackbone`; becomes a part of the detector.
        settings: `DetectSettings`.
        num_classes: without the background.
        num_keypoints: of an object; used by keypoint_rcnn alone.
        mean, std: with which the detector standardises its images, given in 0..1.

    Returns:
        torchvision's module: lists of images and targets -> dict of losses; in evaluation images -> predictions.
    """
    norm = nn.BatchNorm2d if settings.batch_norm == "train" else None
    parts = _pyramid_parts if settings.features == "fpn" else _third_stage_parts
    return MODELS[settings.model](
        **parts(backbone, settings, num_classes + 1, num_keypoints, norm),
        min_size=settings.min_size,
        max_size=settings.max_size,
        image_mean=list(mean),
        image_std=list(std),
        box_batch_size_per_image=settings.rois_per_image,
    )


def _pyramid_parts(backbone, settings, num_classes, num_keypoints, norm):
    strides = [stride for _, stride in measure_stages(backbone)]
    strides.append(2 * strides[-1])
    channels = settings.fpn_channels
    box_head = FastRCNNConvFCHead(
        (channels, 7, 7), [channels] * BOX_CONVOLUTIONS, [settings.head_units], norm_layer=norm
    )
    parts = {
        "backbone": PyramidFeatures(backbone, channels, norm),
        "rpn_anchor_generator": AnchorGenerator(
            tuple((FPN_ANCHOR * stride,) for stride in strides), (ASPECT_RATIOS,) * len(strides)
        ),
        "box_roi_pool": _pool(strides[:-1], 7),
        "box_head": box_head,
        "box_predictor": FastRCNNPredictor(settings.head_units, num_classes),
    }
    if settings.model == "mask_rcnn":
        parts |= {
            "mask_roi_pool": _pool(strides[:-1], 14),
            "mask_head": MaskRCNNHeads(channels, [channels] * MASK_CONVOLUTIONS, 1, norm_layer=norm),
            "mask_predictor": MaskRCNNPredictor(channels, channels, num_classes),
        }
    if settings.model == "keypoint_rcnn":
        parts |= {
            "keypoint_roi_pool": _pool(strides[:-1], 14),
            "keypoint_head": KeypointRCNNHeads(channels, [2 * channels] * KEYPOINT_CONVOLUTIONS),
            "keypoint_predictor": KeypointRCNNPredictor(2 * channels, num_keypoints),
        }
    return parts


def _third_stage_parts(backbone, settings, num_classes, _num_keypoints, norm):
    """The fourth stage is the head, with one more batch norm after it (He et al., 2020). Box and mask share it."""
    channels = measure_stages(backbone)
    width, stride = channels[3][0], channels[2][1]
    head = nn.Sequential(backbone.layer4, nn.Identity() if norm is None else norm(width))
    parts = {
        "backbone": ThirdStageFeatures(backbone),
        "rpn_anchor_generator": AnchorGenerator((tuple(size * stride for size in C4_ANCHORS),), (ASPECT_RATIOS,)),
        "box_roi_pool": _pool([stride], 14),
        "box_head": nn.Sequential(head, nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        "box_predictor": FastRCNNPredictor(width, num_classes),
        **C4_PROPOSALS,
    }
    if settings.model == "mask_rcnn":
        parts |= {
            "mask_roi_pool": _pool([stride], 14),
            "mask_head": head,
            "mask_predictor": MaskRCNNPredictor(width, settings.fpn_channels, num_classes),
        }
    return parts


def _pool(strides, side):
    names = [str(number) for number in range(len(strides))]
    return MultiScaleRoIAlign(names, output_size=side, sampling_ratio=2)
