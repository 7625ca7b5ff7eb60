"""The groups of a configuration: every key, its type, its default and its meaning."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

from iecl_fast.engine.schema import Range

Positive = Annotated[int, Range(minimum=1)]
Threads = Annotated[int, Range(minimum=1, maximum=1024)]  # OpenMP ends the process when it cannot start them
Count = Annotated[int, Range(minimum=0)]
Seed = Annotated[int, Range(minimum=0, maximum=2**32 - 1)]
Amount = Annotated[float, Range(minimum=0)]
Percentile = Annotated[float, Range(minimum=0, maximum=100)]


@dataclass(frozen=True)
class RingConfig:
    """Negatives are the keys between two percentiles of the similarity to the query (Wu et al., 2021).

    Attributes:
        lower: w_l at the start and, after annealing, at the end; a single number stays as it is.
        upper: w_u; 100 makes the ring a ball.
        anneal: fraction of all steps over which w_l moves.
        anneal_epochs: the same in epochs, in place of `anneal`; null leaves it to that.
        shape: of the way: linear, cosine, or step, which jumps; adaptive waits while the loss rises.
        stages: jumps of step.
    """

    lower: tuple[Percentile, Percentile] | Percentile = (0.0, 90.0)
    upper: Percentile = 99.0
    anneal: Annotated[float, Range(above=0, maximum=1)] = 1.0
    anneal_epochs: Annotated[float, Range(above=0)] | None = None
    shape: Literal["linear", "step", "cosine", "adaptive"] = "linear"
    stages: Positive = 10


@dataclass(frozen=True)
class SaibConfig:
    """SAIB, the block that transforms one of the two views (Zhang et al., 2026); see `iecl_fast.SAIB`.

    Attributes:
        channels: "patch" takes each image by itself; "batch", the paper's, mixes the images of a batch, whose size is
            then part of the block.
        patch_size: side in pixels; it divides views.image_size. null takes 4 for 32 pixels, 16 for 224, and for other
            sizes the greatest divisor up to a fourteenth of the size, or to 4.
        activation, expansion, cascade, positional: as `iecl_fast.SAIB` has them.
    """

    channels: Literal["patch", "batch"] = "patch"
    patch_size: Positive | None = None
    activation: Literal["relu", "silu"] = "relu"
    expansion: Literal["free", "monotone"] = "free"
    cascade: Positive = 1
    positional: bool = True

    def patch_size_for(self, image_size):
        """The side of a patch for images of that size."""
        if self.patch_size is not None:
            return self.patch_size
        return max(side for side in range(1, max(4, image_size // 14) + 1) if image_size % side == 0)


@dataclass(frozen=True)
class EncoderConfig:
    """The backbone.

    Attributes:
        name: torchvision's ResNet.
        stem: "small" is one 3x3 convolution without pooling, for images of 32 pixels; "imagenet" is the original.
        width: channels of the first stage; the others follow in proportion. 64 is the original.
    """

    name: Literal["resnet18", "resnet34", "resnet50"] = "resnet18"
    stem: Literal["small", "imagenet"] = "small"
    width: Positive = 64


@dataclass(frozen=True)
class DataConfig:
    """Where the images come from.

    Attributes:
        name: digits, cifar10, cifar100, stl10, imagenet, or a folder with train/<class>/ and test/<class>/ (or val/).
        root: folder of the downloaded data sets; null means the default place.
        limit: use that many training images, the classes in equal parts; null means all. The test images stay all.
        workers: processes that load images; 0 loads them between the steps.
        download: fetch a missing data set, where torchvision can.
    """

    name: str = "digits"
    root: str | None = None
    limit: Positive | None = None
    workers: Count = 0
    download: bool = False


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimiser.

    Attributes:
        lr: peak learning rate.
        momentum: of sgd; adamw has none.
    """

    name: Literal["sgd", "adamw"] = "sgd"
    lr: Annotated[float, Range(above=0)] = 0.03
    momentum: Annotated[float, Range(minimum=0, maximum=1)] = 0.9
    weight_decay: Amount = 1e-4


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the run.

    Attributes:
        name: cosine falls to 0 at the last step; step multiplies by gamma at each milestone; constant.
        warmup_epochs: linear rise from 0, before.
        milestones: epochs, ascending; step only.
        gamma: step only.
    """

    name: Literal["cosine", "step", "constant"] = "cosine"
    warmup_epochs: Amount = 0.0
    milestones: tuple[Positive, ...] = ()
    gamma: Annotated[float, Range(above=0, maximum=1)] = 0.1


@dataclass(frozen=True)
class TrainerConfig:
    """How long, how large, on what.

    Attributes:
        epochs: passes over the training images.
        batch_size: images of one forward pass, all devices together.
        accumulate: forward passes of one optimiser step.
        precision: of the arithmetic; the weights stay float32.
        accelerator: "auto" is cuda where there is one, else cpu.
        devices: how many on each machine, each with a process of its own and its part of each batch. "auto" is all;
            null is one, or under torchrun as many as it has started.
        num_nodes: machines, each with that many devices; null is one, or under torchrun what it was told.
        sync_batch_norm: batch norm of the trained encoder over the images of all devices and not of each. CUDA only.
        threads: of the CPU's arithmetic; null leaves it to torch and OMP_NUM_THREADS. A small network is hardly slower
            on one, and does not stall when other programs want the second core.
        log_steps: optimiser steps from one row of metrics.csv to the next.
        checkpoint_steps: optimiser steps from one checkpoint to the next; null writes one at the end of each epoch.
        progress: show the progress bar.
    """

    epochs: Positive = 200
    batch_size: Positive = 256
    accumulate: Positive = 1
    precision: Literal["32-true", "16-mixed", "bf16-mixed"] = "32-true"
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    devices: Positive | Literal["auto"] | None = None
    num_nodes: Positive | None = None
    sync_batch_norm: bool = False
    threads: Threads | None = None
    log_steps: Positive = 10
    checkpoint_steps: Positive | None = None
    progress: bool = True


@dataclass(frozen=True)
class EvaluateConfig:
    """What is measured on the frozen features, before and after training.

    Attributes:
        batch_size: images of one forward pass.
        knn_k, knn_temperature: weighted kNN; k is clipped to the number of training images.
        linear_l2: weight of half the squared norm of the probe's weights, beside the mean cross entropy.
        linear_iterations: at most so many L-BFGS iterations.
        linear_features: "pooled", or "map": what is pooled in the end, 512 x 7 x 7 numbers of a ResNet-18 at 224 pixels
            (Wu et al., 2021), classified by SGD on cropped and mirrored images. That costs a training of its own, whose
            batches are `batch_size`.
        linear_epochs, linear_lr: of that training.
    """

    batch_size: Positive = 256
    knn_k: Positive = 200
    knn_temperature: Annotated[float, Range(above=0)] = 0.07
    linear_l2: Amount = 1e-3
    linear_iterations: Positive = 200
    linear_features: Literal["pooled", "map"] = "pooled"
    linear_epochs: Positive = 100
    linear_lr: Annotated[float, Range(above=0)] = 0.01


@dataclass(frozen=True)
class Config:
    """All of a run. `method` and `views` hold the options of the named class and of the views."""

    method: dict
    ring: RingConfig | None
    saib: SaibConfig | None
    encoder: EncoderConfig
    data: DataConfig
    views: dict
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    trainer: TrainerConfig
    evaluate: EvaluateConfig
    seed: int
    output: str | None

    def to_dict(self):
        """Plain nested values, as YAML and a checkpoint take them; `resolve` gives the same configuration back."""
        return _plain(dataclasses.asdict(self))


def _plain(value):
    """The same value with lists for tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


GROUPS = {
    "ring": RingConfig,
    "saib": SaibConfig,
    "encoder": EncoderConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "trainer": TrainerConfig,
    "evaluate": EvaluateConfig,
}

# Groups that are a part of the method, which may also be left out: null, the default.
PARTS = ("ring", "saib")

# Keys that a resumed run may change: they say where and with what means the work is done, not what it is.
MAY_DIFFER = (
    "output",
    "data.root",
    "data.workers",
    "data.download",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.threads",
    "trainer.checkpoint_steps",
    "trainer.progress",
)
