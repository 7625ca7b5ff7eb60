"""The backbone of a checkpoint as a part of a larger network: its stages, its batch norm, whether it moves."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from iecl_fast.engine.errors import RunError
from iecl_fast.evaluate.features import frozen

STAGES = ("layer1", "layer2", "layer3", "layer4")


class Stages(nn.Module):
    """A ResNet up to a stage: (N, 3, H, W) -> list of the stages' outputs, (N, C, h, w) each.

    Args:
        backbone: `ResNetBackbone`; it stays whole, later stages are not called.
        last: number of the last stage, 1 .. 4.
        first: number of the first stage whose output is returned.
    """

    def __init__(self, backbone, *, first=1, last=4):
        super().__init__()
        self.backbone, self.first, self.last = backbone, first, last

    def forward(self, images):
        backbone = self.backbone
        features = backbone.maxpool(backbone.relu(backbone.bn1(backbone.conv1(images))))
        outputs = []
        for number, stage in enumerate(STAGES[: self.last], start=1):
            features = getattr(backbone, stage)(features)
            if number >= self.first:
                outputs.append(features)
        return outputs


def measure_stages(backbone):
    """Channels and stride in pixels of each stage of a backbone, as a small image shows them.

    Returns:
        list of (channels, stride), one for each of the four stages.
    """
    side = 64
    images = torch.zeros(1, 3, side, side, device=backbone.conv1.weight.device)
    with frozen(backbone):
        return [(output.shape[1], side // output.shape[3]) for output in Stages(backbone)(images)]


def dilate(backbone, output_stride):
    """Keep the stages' outputs as large as an output stride asks: dilation takes the place of strides beyond it.

    A stage whose stride is taken away has its later convolutions look twice as far apart, as those before it do
    (Chen et al., 2017, "Rethinking Atrous Convolution for Semantic Image Segmentation", section 3.1). The weights stay.

    Args:
        backbone: `ResNetBackbone`, changed in place.
        output_stride: pixels.
    """
    dilation = 1
    for name, (_, stride) in zip(STAGES, measure_stages(backbone)):
        before, dilation = dilation, max(1, stride // output_stride)
        for number, block in enumerate(getattr(backbone, name)):
            for convolution in (module for module in block.modules() if isinstance(module, nn.Conv2d)):
                if dilation > before:
                    convolution.stride = (1, 1)
                if convolution.kernel_size == (3, 3):
                    # The first block still sees the features as the stage before left them.
                    spread = before if number == 0 else dilation
                    convolution.dilation = convolution.padding = (spread, spread)


class Stillness:
    """Keeps a backbone, or its batch norm alone, from changing while the network around it is trained.

    Args:
        backbone: module.
        freeze: all parameters and buffers stay.
        batch_norm: "frozen": those of batch norm stay.
    """

    def __init__(self, backbone, *, freeze, batch_norm):
        self.backbone = backbone
        if freeze:
            self.still = [backbone]
        else:
            norms = [module for module in backbone.modules() if isinstance(module, _BatchNorm)]
            self.still = norms if batch_norm == "frozen" else []
        for module in self.still:
            module.requires_grad_(False)
        self._before = {name: tensor.detach().clone() for name, tensor in self._tensors().items()}

    def hold(self):
        """After every ``model.train()``: what is still is in evaluation mode."""
        for module in self.still:
            module.eval()

    def check(self):
        """Parameters and buffers of what is still have the bits they had.

        Raises:
            RunError: they have not; names them.
        """
        pairs = ((name, tensor, self._before[name].to(tensor.device)) for name, tensor in self._tensors().items())
        moved = [name for name, tensor, before in pairs if not torch.equal(tensor, before)]
        if moved:
            raise RunError(f"the frozen backbone has changed: {', '.join(moved)}")

    def _tensors(self):
        still = {id(tensor) for module in self.still for tensor in (*module.parameters(), *module.buffers())}
        named = [*self.backbone.named_parameters(), *self.backbone.named_buffers()]
        return {name: tensor for name, tensor in named if id(tensor) in still}
