"""The groups of a configuration: every key, its type, its default and its meaning."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

from iecl_fast.engine.schema import Range

MOST = 2**31 - 1  # of what is counted: more than any machine has, and it fits every C integer on the way
Positive = Annotated[int, Range(minimum=1, maximum=MOST)]
Threads = Annotated[int, Range(minimum=1, maximum=1024)]  # OpenMP ends the process when it cannot start them
Workers = Annotated[int, Range(minimum=0, maximum=1024)]
Count = Annotated[int, Range(minimum=0, maximum=MOST)]
Seed = Annotated[int, Range(minimum=0, maximum=2**32 - 1)]
Amount = Annotated[float, Range(minimum=0)]
PositiveAmount = Annotated[float, Range(above=0)]
Momentum = Annotated[float, Range(minimum=0, maximum=1)]
Percentile = Annotated[float, Range(minimum=0, maximum=100)]
RateSchedule = Literal["cosine", "step", "constant"]


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
    anneal_epochs: PositiveAmount | None = None
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
        name: digits, cifar10, cifar100, stl10, imagenet, aircraft, dtd, flowers102, food101, gtsrb, pets, svhn, or a
            folder with train/<class>/ and test/<class>/ (or val/).
        root: folder of the downloaded data sets; null means the default place.
        limit: use that many training images, the classes in equal parts; null means all. The test images stay all.
        workers: processes that load images; 0 loads them between the steps.
        download: fetch a missing data set, where torchvision can.
        max_unreadable: so many images may be unreadable before a run gives up; each is named, and another one is taken
            in its place. 0 gives up at the first.
    """

    name: str = "digits"
    root: str | None = None
    limit: Positive | None = None
    workers: Workers = 0
    download: bool = False
    max_unreadable: Count = 10


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimiser.

    Attributes:
        lr: peak learning rate.
        momentum: of sgd; adamw has none.
    """

    name: Literal["sgd", "adamw"] = "sgd"
    lr: PositiveAmount = 0.03
    momentum: Momentum = 0.9
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

    name: RateSchedule = "cosine"
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
        precision: of the arithmetic; the weights stay float32. 16-mixed scales the loss so that float16's range is
            enough, and leaves out a step whose gradient overflows.
        compile: the forward pass and the loss by torch.compile, which needs a C++ compiler on a CPU.
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
        nan_loss: a loss that is no finite number stops the run; or skip leaves such a step out, which makes each step
            wait for its loss.
        max_skipped: so many steps in a row may be left out before the run stops after all.
    """

    epochs: Positive = 200
    batch_size: Positive = 256
    accumulate: Positive = 1
    precision: Literal["32-true", "16-mixed", "bf16-mixed"] = "32-true"
    compile: bool = False
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    devices: Positive | Literal["auto"] | None = None
    num_nodes: Positive | None = None
    sync_batch_norm: bool = False
    threads: Threads | None = None
    log_steps: Positive = 10
    checkpoint_steps: Positive | None = None
    progress: bool = True
    nan_loss: Literal["stop", "skip"] = "stop"
    max_skipped: Positive = 10


@dataclass(frozen=True)
class LinearProtocol:
    """A linear classifier that learns by SGD from frozen features.

    Attributes:
        features: "pooled", or "map": what is pooled in the end, 512 x 7 x 7 numbers of a ResNet-18 at 224 pixels.
        crops: learn from cropped and mirrored images, whose features are computed anew in each epoch.
        epochs, batch_size, lr, momentum, weight_decay: of the training.
        schedule: of the rate: cosine to 0, step to a tenth after 60 and after 80 % of the epochs, constant.
    """

    features: str
    crops: bool
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float
    schedule: str


# The papers do not give all of it: the schedules, and Ring's batch, momentum and weight decay, are ours.
LINEAR_PROTOCOLS = {
    "iecl": LinearProtocol("pooled", True, 200, 512, 0.03, 0.9, 1e-5, "cosine"),
    "ring": LinearProtocol("map", True, 100, 256, 0.01, 0.9, 0.0, "step"),
}


@dataclass(frozen=True)
class EvaluateConfig:
    """How an encoder is measured: on its frozen features, before and after the training, and by ``evaluate``.

    Attributes:
        batch_size: images of one forward pass.
        labels: part of the training images whose labels are used, in each class alike and drawn by the seed; at least
            one of each class.
        statistics: with which the images of other data than the run's are standardised: "own" computes mean and
            deviation of their training images, "run" takes the run's.
        knn_k, knn_temperature: weighted kNN; k is clipped to the number of training images.
        linear: "lbfgs" fits the pooled features of the images as they are, in seconds. "iecl" (Zhang et al., 2026) and
            "ring" (Wu et al., 2021) are the papers' SGD, which costs a training of its own.
        linear_l2: lbfgs only: weight of half the squared norm of the classifier's weights, beside the mean cross
            entropy.
        linear_iterations: lbfgs only: at most so many.
        linear_features, linear_crops, linear_epochs, linear_batch_size, linear_lr, linear_momentum,
            linear_weight_decay, linear_schedule: iecl and ring only, see `LinearProtocol`; null is the paper's.
        finetune_epochs, finetune_batch_size, finetune_momentum, finetune_weight_decay, finetune_schedule: SGD on the
            whole network, with cropped and mirrored images.
        finetune_lr, finetune_head_lr: peak rates of the backbone and of the new classifier.
    """

    batch_size: Positive = 256
    labels: Annotated[float, Range(above=0, maximum=1)] = 1.0
    statistics: Literal["own", "run"] = "own"
    knn_k: Positive = 200
    knn_temperature: PositiveAmount = 0.07
    linear: Literal["lbfgs", "iecl", "ring"] = "lbfgs"
    linear_l2: Amount = 1e-3
    linear_iterations: Positive = 200
    linear_features: Literal["pooled", "map"] | None = None
    linear_crops: bool | None = None
    linear_epochs: Positive | None = None
    linear_batch_size: Positive | None = None
    linear_lr: PositiveAmount | None = None
    linear_momentum: Momentum | None = None
    linear_weight_decay: Amount | None = None
    linear_schedule: RateSchedule | None = None
    finetune_epochs: Positive = 30
    finetune_batch_size: Annotated[int, Range(minimum=2)] = 64
    finetune_lr: PositiveAmount = 0.01
    finetune_head_lr: PositiveAmount = 0.1
    finetune_momentum: Momentum = 0.9
    finetune_weight_decay: Amount = 1e-4
    finetune_schedule: RateSchedule = "cosine"

    def linear_overrides(self):
        """The values of `LinearProtocol` that are given, by their names there."""
        names = [field.name for field in dataclasses.fields(LinearProtocol)]
        values = {name: getattr(self, f"linear_{name}") for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def linear_protocol(self):
        """The `LinearProtocol` to follow, or None for L-BFGS."""
        if self.linear == "lbfgs":
            return None
        return dataclasses.replace(LINEAR_PROTOCOLS[self.linear], **self.linear_overrides())


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
    "method.sharded",
    "data.root",
    "data.workers",
    "data.download",
    "data.max_unreadable",
    "trainer.compile",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.threads",
    "trainer.checkpoint_steps",
    "trainer.progress",
    "trainer.nan_loss",
    "trainer.max_skipped",
)
