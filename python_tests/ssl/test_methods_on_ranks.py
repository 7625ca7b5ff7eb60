"""Each method on two and on three processes is one process on the joined batch: losses, gradients, queue and bank.

Batch norm is over all ranks' images here, as SyncBatchNorm's, which has no form for the CPU. The truth is float64, and
the ranks may be twice as far from it as one process in float32 is.
"""

import pytest
import torch
import torch.distributed as dist
from double import in_double
from small import Pixels
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accuracy import assert_as_accurate
from iecl_fast import SAIB
from iecl_fast.ring import RingSchedule
from iecl_fast.ssl import LabBackbone, build_method
from iecl_fast.ssl.gather import gather_rows_with_gradient, own_buffers
from ranks import run_on_group_sizes
from torch_threads import torch_threads
from toys import Normed

WORLD_SIZES = (2, 3)
IMAGES, SIDE = 60, 4
# Forward passes of each step, as the ranks' parts: the second and the fourth step accumulate, one batch is uneven.
PARTS = {
    2: [[(6, 6)], [(6, 6), (6, 6)], [(7, 4)], [(6, 6)] * 4],
    3: [[(4, 4, 4)], [(4, 4, 4), (4, 4, 4)], [(5, 4, 2)], [(4, 4, 4)] * 4],
}
RING = {"lower": (10, 30), "upper": 90, "steps": 4}
BANK = {"num_images": IMAGES, "dim": 8, "num_samples": 5, "temperature": 0.3}
ONE_KEY = {"lower": 50, "upper": 52, "steps": 1}  # of 59: the draws are no matter of chance
SMALL = {"dim": 8, "jacobian_steps": 0}
QUEUE = {"num_keys": 30, "momentum": 0.5, "temperature": 0.3, "hidden_dim": 16}
PREDICTORS = {"hidden_dim": 16}

CASES = {
    "moco": ("moco", SMALL | QUEUE, ()),
    "moco, all parts": ("moco", SMALL | QUEUE | {"head": "mlp3", "symmetric": True}, ("ring", "saib", "spectral")),
    "iecl": ("iecl", SMALL | QUEUE, ("ring", "saib", "spectral")),
    "iecl, other terms": ("iecl", SMALL | QUEUE | {"entropy": "uniformity", "kl_variance": "full"}, ("spectral",)),
    "simclr": ("simclr", SMALL, ()),
    "simclr, all parts": ("simclr", SMALL | {"temperature": 0.3}, ("ring", "saib", "spectral")),
    "byol": ("byol", SMALL | PREDICTORS | {"momentum": 0.5}, ()),
    "byol, all parts": ("byol", SMALL | PREDICTORS | {"momentum": 0.5}, ("saib", "spectral")),
    "simsiam": ("simsiam", SMALL | PREDICTORS, ()),
    "simsiam, all parts": ("simsiam", SMALL | PREDICTORS, ("saib", "spectral")),
    "ir": ("ir", BANK, ()),
    "ir, nce": ("ir", BANK | {"loss": "nce"}, ()),
    "cmc": ("cmc", BANK, ()),
    "la": ("la", BANK | {"steps_per_epoch": 1, "num_neighbors": 9, "num_clusters": 4, "warm_start": 1.0}, ()),
}


class _Joined:
    """In a batch norm: the statistics are of all ranks' rows."""

    def forward(self, rows):
        joined, start = gather_rows_with_gradient(rows)
        return super().forward(joined)[start : start + len(rows)]


class Joined1d(_Joined, nn.BatchNorm1d):
    pass


class Joined2d(_Joined, nn.BatchNorm2d):
    pass


class Lab(LabBackbone):
    def split(self, images):
        return [part.to(images.dtype) for part in super().split(images)]


def build(case):
    name, options, parts = CASES[case]
    options = dict(options)
    torch.manual_seed(0)
    backbone = Lab(Pixels(1), Pixels(2), mean=(0.5,) * 3, std=(0.2,) * 3) if name == "cmc" else Normed()
    if name in ("ir", "cmc"):
        options["ring"] = RingSchedule(**ONE_KEY)
    if "ring" in parts:
        options["ring"] = RingSchedule(**RING)
    if "saib" in parts:
        options["saib"] = SAIB(channels="patch", patch_size=2, image_size=SIDE)
    if "spectral" in parts or name == "iecl":
        options["spectral"] = "spectral" in parts
    method = build_method(name, backbone, **options)
    if name == "la":
        method.ring = RingSchedule(**ONE_KEY)  # for its warm start
        method.look_up_step()
    for module in method.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.__class__ = Joined1d if isinstance(module, nn.BatchNorm1d) else Joined2d
    return method


def passes(parts):
    """Views and indices of the joined batches, step by step; the same for any parts of as many images.

    An image may come twice in a pass. Of one that comes in several passes of a step a bank takes the last rank's key,
    where one process takes the last pass's: so, as in an epoch, none does.
    """
    generator = torch.Generator().manual_seed(1)
    for step in parts:
        sizes = [sum(part) for part in step]
        index = torch.randperm(IMAGES, generator=generator)[: sum(sizes)].split(sizes)
        if len(step) == 1:
            index = [torch.randint(0, IMAGES, (sizes[0],), generator=generator)]
        yield [
            ([torch.randn(n, 3, SIDE, SIDE, generator=generator) for _ in range(2)], own)
            for n, own in zip(sizes, index, strict=True)
        ]


def train(case, parts, rank=0, dtype=torch.float32, wrap=lambda method: method, rolled=0):
    """The steps of a rank on its parts of the batches; of one process if every part is one number.

    ``rolled``: by how many places the images of a pass come later, which is the same but for rounding where nothing
    remembers them.

    Returns:
        dict of vectors: ``losses``, of each pass and term the rank's share of the joined batch's; ``gradients`` of all
        steps; ``state`` and ``counts``, the numbers of the state_dict in the end.
    """
    method = build(case).to(dtype)
    wrapped = wrap(method)
    trained = [parameter for parameter in method.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    losses, gradients = [], []
    for step, joined in enumerate(passes(parts)):
        optimizer.zero_grad()
        for number, (views, index) in enumerate(joined):
            sizes = parts[step][number]
            own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
            views = [view[own].to(dtype) for view in views][: method.num_views]
            views = [view.roll(rolled, 0) for view in views]
            # DDP takes the mean over the ranks, of which each stands for its images.
            share = sizes[rank] * len(sizes) / sum(sizes)
            last = number == len(joined) - 1
            with wrapped.no_sync() if not last and wrapped is not method else torch.enable_grad():
                terms = wrapped(views, index[own]).values()
                (sum(terms) * share / len(joined)).backward()
            losses += [term.item() * share / len(sizes) for term in terms]
        gradients += [parameter.grad.flatten().clone() for parameter in trained]
        optimizer.step()
        method.after_step()
    state = [value.flatten() for value in method.state_dict().values() if value.is_floating_point()]
    counts = [value.flatten() for value in method.state_dict().values() if not value.is_floating_point()]
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "gradients": torch.cat(gradients),
        "state": torch.cat(state),
        "counts": torch.cat(counts),
    }


def gather(rank):
    """Rows that are their own numbers, as many on a rank as its number says, and what a weighted sum gives back."""
    start = sum(range(rank))
    rows = torch.arange(start, start + rank)[:, None] * torch.ones(3)
    joined, first = gather_rows_with_gradient(rows.requires_grad_())
    ((rank + 1) * joined * torch.arange(float(len(joined)))[:, None]).sum().backward()
    return {"rows": rows.detach(), "joined": joined.detach(), "first": torch.tensor(first), "gradient": rows.grad}


def train_all(rank):
    size = dist.get_world_size()
    results = {
        case: train(case, PARTS[size], rank, wrap=lambda method: DistributedDataParallel(method, **own_buffers()))
        for case in CASES
    }
    return results | {"gather": gather(rank)}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Rounding errors are compared: those of one process must not depend on the machine's cores."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory, one_thread):
    return run_on_group_sizes(train_all, tmp_path_factory.mktemp("ranks"), world_sizes=WORLD_SIZES)


@pytest.mark.parametrize("case", CASES)
def test_ranks_are_one_process_on_the_joined_batch(of_ranks, case):
    alone = [[(sum(part),) for part in step] for step in PARTS[2]]
    with in_double():
        truth = train(case, alone, dtype=torch.float64)
    # How wrong one process is: in the worst of some orders of the images, or one's luck would be the measure.
    orders = range(8) if CASES[case][0] in ("simclr", "byol", "simsiam") else [0]
    one_process = [train(case, alone, rolled=order) for order in orders]
    plain = {
        name: max((run[name] for run in one_process), key=lambda value, name=name: (value - truth[name]).abs().max())
        for name in truth
    }
    for size in WORLD_SIZES:
        results = [result[case] for result in of_ranks[size]]
        for name in ("gradients", "state", "counts"):
            assert all(torch.equal(result[name], results[0][name]) for result in results), f"{name} of {size} ranks"
        assert torch.equal(results[0]["counts"], plain["counts"])
        losses = sum(result["losses"] for result in results)
        assert_as_accurate(losses.float(), truth["losses"], plain["losses"].float())
        for name in ("gradients", "state"):
            assert_as_accurate(results[0][name], truth[name], plain[name])


def test_gathered_rows_and_their_gradients(of_ranks):
    for size, results in of_ranks.items():
        count = sum(range(size))
        for rank, result in enumerate(result["gather"] for result in results):
            assert result["first"] == sum(range(rank))
            assert torch.equal(result["joined"], torch.arange(float(count))[:, None] * torch.ones(3))
            # Every rank's loss wants its part, the ranks weigh 1, 2, ...
            assert torch.equal(result["gradient"], sum(range(size + 1)) * result["rows"])


@pytest.mark.parametrize("n", [0, 3])
def test_alone_rows_pass_unchanged(n):
    rows = torch.zeros(n, 2, requires_grad=True)
    joined, start = gather_rows_with_gradient(rows)
    assert joined is rows and start == 0
