"""torchvision's DeepLab-v3 around a backbone of ours."""

from collections import OrderedDict

from torch import nn
from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3

from iecl_fast.evaluate.dense.backbone import Stages, dilate, measure_stages

ATROUS_RATES = (6, 12, 18)  # at an output stride of 16 (Chen et al., 2017)


class LastStageFeatures(nn.Module):
    """The fourth stage's output under the name that torchvision's DeepLab reads."""

    def __init__(self, backbone):
        super().__init__()
        self.stages = Stages(backbone, first=4)

    def forward(self, images):
        return OrderedDict([("out", self.stages(images)[0])])


def build_segmenter(backbone, *, output_stride, num_classes):
    """DeepLab-v3: standardised images (N, 3, H, W) -> {"out": scores (N, num_classes + 1, H, W)}.

    Args:
        backbone: `ResNetBackbone`; becomes a part of it, its strides changed as `dilate` says.
        output_stride: pixels of an image for one of the features. A backbone for small images may have less.
        num_classes: without the background, which is class 0.
    """
    dilate(backbone, output_stride)
    width, stride = measure_stages(backbone)[3]
    # The rates look as many pixels apart at every stride.
    rates = [max(1, rate * 16 // stride) for rate in ATROUS_RATES]
    return DeepLabV3(LastStageFeatures(backbone), DeepLabHead(width, num_classes + 1, rates))
