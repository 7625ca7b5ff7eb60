"""A whole training step of each method, plain and with what can be plugged in, and the parts of MoCo's step."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.spectral import peers as spectral_peers
from iecl_fast import SAIB, RingSchedule, ring_info_nce
from iecl_fast.ssl import (
    BYOL,
    IECL,
    InformationTerms,
    Method,
    MoCo,
    ResNetBackbone,
    SimCLR,
    SimSiam,
    build_backbone,
    normalize_rows,
)

DIM, TEMPERATURE = 128, 0.2  # MoCo v2
LOWER, UPPER = 90, 99
INTERVAL = 8  # steps from one with the information terms to the next


@dataclass(frozen=True)
class Setting:
    """A network, a batch and where they are. On a GPU in bfloat16 autocast and channels-last."""

    network: str
    stem: str
    size: int
    n: int
    num_keys: int
    patch_size: int
    device: str

    def __str__(self) -> str:
        return f"{self.network}, {self.size} x {self.size}, N={self.n}, K={self.num_keys}, {self.device}"

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.device == "cuda" else torch.contiguous_format

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    def backbone(self) -> ResNetBackbone:
        backbone = build_backbone(self.network, self.stem).to(self.device)
        return backbone.to(memory_format=self.memory_format)

    def images(self) -> Tensor:
        images = torch.randn(self.n, 3, self.size, self.size, device=self.device)
        return images.contiguous(memory_format=self.memory_format)

    def saib(self) -> SAIB:
        """The paper's: the batch is the channel axis."""
        return SAIB("batch", self.n, self.patch_size, self.size).to(self.device)


# The batch of the CIFAR-10 recipes, 256, would take two CPU cores minutes for a round of all forms. Beside the encoder,
# which grows with N, a small batch makes spectral normalisation look dearer than it is there, and SAIB cheaper.
CPU = Setting("resnet18", "small", size=32, n=16, num_keys=4096, patch_size=4, device="cpu")
GPU = Setting("resnet50", "imagenet", size=224, n=256, num_keys=65536, patch_size=16, device="cuda")


def setting() -> Setting:
    """The GPU's where there is one."""
    return GPU if torch.cuda.is_available() else CPU


def ring() -> RingSchedule:
    return RingSchedule(lower=LOWER, upper=UPPER, steps=1)


def moco(setting: Setting, **parts) -> MoCo:
    return MoCo(setting.backbone(), dim=DIM, num_keys=setting.num_keys, temperature=TEMPERATURE, **parts)


def iecl(setting: Setting, **parts) -> IECL:
    """With the head of MoCo v2."""
    head = {"dim": DIM, "head": "mlp", "hidden_dim": None}
    return IECL(setting.backbone(), num_keys=setting.num_keys, temperature=TEMPERATURE, **head, **parts)


def _forms(method: type[Method]) -> dict[str, Callable[[Setting], Method]]:
    return {
        "plain": lambda setting: method(setting.backbone()),
        "+ spectral norm": lambda setting: method(setting.backbone(), spectral=True),
        "+ SAIB": lambda setting: method(setting.backbone(), saib=setting.saib()),
    }


METHODS: dict[str, dict[str, Callable[[Setting], Method]]] = {
    "moco": {
        "plain": moco,
        "+ Ring": lambda setting: moco(setting, ring=ring()),
        "+ spectral norm": lambda setting: moco(setting, spectral=True),
        "+ SAIB": lambda setting: moco(setting, saib=setting.saib()),
        "+ SAIB, not trained": lambda setting: moco(setting, saib=setting.saib(), entropy_weight=0.0),
        "+ all three": lambda setting: moco(setting, ring=ring(), spectral=True, saib=setting.saib()),
        "IE-CL with Ring": lambda setting: iecl(setting, ring=ring(), saib=setting.saib()),
    },
    f"moco, {INTERVAL} steps": {
        "plain": moco,
        "+ all three": lambda setting: moco(
            setting, ring=ring(), spectral=True, saib=setting.saib(), terms_interval=INTERVAL
        ),
        "IE-CL with Ring": lambda setting: iecl(setting, ring=ring(), saib=setting.saib(), terms_interval=INTERVAL),
    },
    "simclr": _forms(SimCLR),
    "byol": _forms(BYOL),
    "simsiam": _forms(SimSiam),
}


def training(name: str, form: str, setting: Setting) -> Callable[[], Tensor]:
    """One step of an entry of ``METHODS``, or as many as its name says: forward, backward, optimiser and after_step.
    Returns the last loss.
    """
    torch.manual_seed(0)
    method = METHODS[name][form](setting).to(setting.device)
    count = INTERVAL if name.endswith(" steps") else 1
    optimizer = torch.optim.SGD(method.parameter_groups(1e-4), lr=1e-3, momentum=0.9)
    views = [setting.images() for _ in range(method.num_views)]

    def run() -> Tensor:
        for _ in range(count):
            with setting.autocast():
                losses = method(views)
            loss = sum(losses.values())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            method.after_step()
        return loss.detach()

    return run


def parts_of_moco(setting: Setting) -> dict[str, Callable[[], Tensor]]:
    """What the steps of MoCo are made of, each once, forward and backward."""
    torch.manual_seed(0)
    method = moco(setting).to(setting.device)
    images = setting.images()
    queries, keys = (normalize_rows(torch.randn(setting.n, DIM, device=setting.device)) for _ in range(2))
    queue, terms = method.queue.keys, InformationTerms()

    def loss(lower: float, upper: float) -> Callable[[Tensor], Tensor]:
        return lambda rows: ring_info_nce(rows, keys, queue, lower=lower, upper=upper, temperature=TEMPERATURE)

    def key_encoder() -> Tensor:
        with setting.autocast():
            return method.key_encoder(images)

    return {
        "encoder": _with_gradient(method.encoder, images, setting),
        "key encoder, forward": key_encoder,
        "loss, all keys": _loss_and_gradient(loss(0, 100), queries),
        "loss, Ring": _loss_and_gradient(loss(LOWER, UPPER), queries),
        "entropy": _loss_and_gradient(lambda rows: terms(rows, rows)["entropy"], queries),
        "SAIB": _with_gradient(setting.saib(), images, setting),
        "spectral norm": spectral_peers.with_gradient(spectral_peers.ours(method.encoder)),
    }


def _with_gradient(module: nn.Module, images: Tensor, setting: Setting) -> Callable[[], Tensor]:
    """Forward, and backward to the parameters; returns the output."""

    def run() -> Tensor:
        with setting.autocast():
            output = module(images)
        output.backward(output.detach())
        module.zero_grad()
        return output.detach()

    return run


def _loss_and_gradient(loss: Callable[[Tensor], Tensor], rows: Tensor) -> Callable[[], Tensor]:
    rows = rows.clone().requires_grad_()
    return lambda: torch.autograd.grad(loss(rows), rows)[0]
