"""Banks and rings over real processes: those of one process, for a few kilobytes a query."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small import Pixels
from torch.nn.parallel import DistributedDataParallel
from traffic import counted_traffic

from iecl_fast import MemoryBank, RingSchedule, ring_info_nce, ring_sample
from iecl_fast.memory_sharded import ShardedMemoryBank
from iecl_fast.ring import sharded
from iecl_fast.ssl import CMC, InstanceDiscrimination, LabBackbone
from ranks import run_on_group_sizes
from ring.cases import query_and_keys

WORLDS = (2, 3)
NUM_ITEMS, DIM = 11, 8
# Of three steps, for the batch of all ranks: an entry comes twice on a rank and on several.
INDEX = torch.tensor([[3, 0, 8, 3, 1, 8], [7, 7, 2, 5, 7, 6], [1, 2, 3, 9, 10, 2]])
FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
PROBLEMS = (
    ("unit", 500, FLOAT),
    ("ties", 9001, BRAIN),
    ("nan", 9001, FLOAT),
    ("infinite", 9001, HALF),
    ("signed_zeros", 400, FLOAT),
    ("constant", 9001, FLOAT),
)
QUERIES = 12
METHODS = ("ir", "ir_nce", "cmc")


def parts(world, count):
    """Slices of all ranks' rows; the first rank has more than the others."""
    least = count // (world + 1)
    starts = [0, *(count - least * (world - rank) for rank in range(1, world)), count]
    return [slice(start, end) for start, end in pairwise(starts)]


def problem(kind, num_keys, dtype):
    torch.manual_seed(num_keys)
    return *query_and_keys(kind, QUERIES, num_keys, 6, dtype), torch.randint(-1, num_keys, (QUERIES,))


def rings(functions, query, keys, exclude):
    """Losses with the gradient of their sum, and draws with those of theirs, each of one query set."""
    info_nce, sample = functions
    leaf = query.clone().requires_grad_()
    loss = info_nce(leaf, query.roll(1, 1), keys, lower=40, upper=90, exclude=exclude, reduction="none")
    results = {"loss": loss.detach(), "loss_gradient": torch.autograd.grad(loss.sum(), leaf)[0]}
    generator = torch.Generator().manual_seed(len(query))
    options = {"num_samples": 30, "exclude": exclude, "generator": generator, "return_indices": True}
    draws, indices = sample(leaf, keys, 40, 90, **options)
    weights = torch.linspace(1, 2, 30)
    return results | {
        "draws": draws.detach(),
        "indices": indices,
        "draws_gradient": torch.autograd.grad((draws * weights).sum(), leaf)[0],
    }


def rings_on_rank(rank, world, kind, num_keys, dtype):
    query, keys, exclude = problem(kind, num_keys, dtype)
    here = parts(world, QUERIES)[rank]
    functions = sharded.ring_info_nce, sharded.ring_sample
    return rings(functions, query[here], keys[parts(world, num_keys)[rank]], exclude[here])


def traffic_on_rank(rank, world, num_keys):
    """Bytes and collectives of a loss and of draws, forward and backward."""
    torch.manual_seed(rank)
    query, keys = (F.normalize(torch.randn(n, 16), dim=1) for n in (8, num_keys))
    measured = []
    for loss in (
        lambda q: sharded.ring_info_nce(q, query.flip(0), keys, lower=90, upper=99),
        lambda q: sharded.ring_sample(q, keys, 90, 99, num_samples=64).sum(),
    ):
        with counted_traffic() as traffic:
            loss(query.clone().requires_grad_()).backward()
        measured += [traffic.bytes / len(query) / world, traffic.calls]
    return torch.tensor(measured, dtype=torch.float64)


def moved_bank(bank, part):
    torch.manual_seed(1)
    for index in INDEX:
        keys = torch.randn(len(index), DIM)
        bank.update(keys[part], index[part])
    return bank


def bank_on_rank(rank, world):
    torch.manual_seed(0)
    bank = ShardedMemoryBank(NUM_ITEMS, DIM)
    after = torch.rand(1)
    first = bank.state_dict()
    moved_bank(bank, parts(world, INDEX.shape[1])[rank])
    index = torch.tensor([[NUM_ITEMS - 1, 0, 5, 0], [3], []][rank]).long()
    tiny = ShardedMemoryBank(2, DIM, momentum=0.0)  # of three ranks one has nothing
    tiny.update(torch.eye(DIM)[rank : rank + 1], torch.tensor([1]))
    return {
        "tiny": tiny.entries(torch.tensor([1, 1])),
        "first": first,
        "after": after,
        "entries": bank.entries(index),
        "state": bank.state_dict(),
        "own": bank.keys,
    }


def resumed_on_rank(rank, world, state):
    bank = ShardedMemoryBank(NUM_ITEMS, DIM)
    bank.load_state_dict(state)
    return moved_bank(bank, parts(world, INDEX.shape[1])[rank]).state_dict()


def build(name, sharded):
    torch.manual_seed(0)
    # Of 11 candidates the ring holds one: draws are no matter of chance.
    options = {"num_images": 12, "dim": DIM, "num_samples": 5, "temperature": 0.2, "sharded": sharded}
    ring = RingSchedule(lower=50, upper=55, steps=1)
    if name == "cmc":
        backbone = LabBackbone(Pixels(1), Pixels(2), mean=(0.5,) * 3, std=(0.2,) * 3)
        return CMC(backbone, ring=ring, **options)
    return InstanceDiscrimination(Pixels(), loss="nce" if name == "ir_nce" else "softmax", ring=ring, **options)


def train(method, wrapped, part):
    images = torch.randn(3, 6, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(method.parameters(), lr=0.5)
    for batch, index in zip(images, INDEX):
        optimizer.zero_grad()
        sum(wrapped([batch[part]], index[part]).values()).backward()
        optimizer.step()
        method.after_step()
    return {name: value.clone() for name, value in method.state_dict().items()}


def train_on_rank(rank, world, name):
    method = build(name, sharded=True)
    equal = 6 // world
    return train(method, DistributedDataParallel(method), slice(equal * rank, equal * (rank + 1)))


def everything(rank, state):
    world = dist.get_world_size()
    results = {
        "bank": bank_on_rank(rank, world),
        "resumed": resumed_on_rank(rank, world, state),
        "traffic": [traffic_on_rank(rank, world, num_keys) for num_keys in (5_000, 20_000)],
        "disagreement": "",
    }
    for kind, num_keys, dtype in PROBLEMS:
        results[f"ring {kind}"] = rings_on_rank(rank, world, kind, num_keys, dtype)
    results["again"] = rings_on_rank(rank, world, *PROBLEMS[0])
    for name in METHODS:
        results[name] = train_on_rank(rank, world, name)
    try:
        sharded.ring_sample(torch.ones(1, 2), torch.ones(5, 2), 10 * rank, 100, num_samples=1)
    except ValueError as error:
        results["disagreement"] = str(error)
    return results


@pytest.fixture(scope="module")
def one_bank():
    torch.manual_seed(0)
    return MemoryBank(NUM_ITEMS, DIM)


@pytest.fixture(scope="module")
def of_groups(tmp_path_factory, one_bank):
    folder = tmp_path_factory.mktemp("ranks")
    return run_on_group_sizes(everything, folder, one_bank.state_dict(), world_sizes=WORLDS)


@pytest.fixture(scope="module", params=WORLDS)
def of_ranks(request, of_groups):
    return of_groups[request.param]


@pytest.mark.parametrize(("kind", "num_keys", "dtype"), PROBLEMS)
def test_rings_are_those_of_one_process(of_ranks, kind, num_keys, dtype):
    query, keys, exclude = problem(kind, num_keys, dtype)
    world = len(of_ranks)
    for rank, here in enumerate(parts(world, QUERIES)):
        result = of_ranks[rank][f"ring {kind}"]
        expected = rings((ring_info_nce, ring_sample), query[here], keys, exclude[here])
        assert torch.equal(result["indices"], expected["indices"])
        assert torch.equal(result["draws"].view(torch.uint8), expected["draws"].view(torch.uint8))
        for name in ("loss", "loss_gradient", "draws_gradient"):
            torch.testing.assert_close(result[name], expected[name], equal_nan=True)


def test_the_same_bits_again(of_ranks):
    for result in of_ranks:
        assert all(torch.equal(result["again"][name], value) for name, value in result["ring unit"].items())


def test_traffic_does_not_grow_with_the_bank(of_ranks):
    """Of 8 queries on each rank with 16 channels: in bytes a query of all ranks."""
    world = len(of_ranks)
    histograms = 2 * 2 * 6 * 64 * 4 * 2 * (world - 1) / world  # of the sample and the windows, for two boundaries
    of_each = 16 * 4 + 8 + 200 * (world - 1)  # the query, counts and shares of ties, what a rank's part adds up to
    for result in of_ranks:
        small, large = result["traffic"]
        for loss_bytes, loss_calls, draw_bytes, draw_calls in (small.tolist(), large.tolist()):
            assert loss_bytes < histograms + of_each < 9000
            assert draw_bytes < histograms + of_each + 64 * (4 + 4 + 4)  # positions, similarities, gradients
            assert loss_calls <= 30 and draw_calls <= 36


def test_a_bank_in_parts_is_a_bank(of_ranks, one_bank):
    torch.manual_seed(0)
    MemoryBank(NUM_ITEMS, DIM)
    after = torch.rand(1)
    moved = MemoryBank(NUM_ITEMS, DIM)
    moved.load_state_dict(one_bank.state_dict())
    moved_bank(moved, slice(None))
    assert not torch.equal(moved.keys, one_bank.keys)
    first, *others = (result["bank"] for result in of_ranks)
    assert torch.equal(first["first"]["keys"], one_bank.keys)
    assert torch.equal(first["state"]["keys"], moved.keys)
    assert all(list(other["state"]) == [] for other in others)
    assert torch.equal(torch.cat([result["bank"]["own"] for result in of_ranks]), moved.keys)
    assert torch.equal(first["entries"], moved.keys[[NUM_ITEMS - 1, 0, 5, 0]])
    assert torch.equal(others[0]["entries"], moved.keys[[3]])
    assert all(torch.equal(result["bank"]["after"], after) for result in of_ranks)
    last = torch.eye(DIM)[len(of_ranks) - 1].expand(2, DIM)  # the key of the last rank
    assert all(torch.equal(result["bank"]["tiny"], last) for result in of_ranks)


def test_resumes_on_another_number_of_ranks(of_ranks, one_bank):
    """What one process saved goes on with two and with three, and theirs with one."""
    moved = moved_bank(ShardedMemoryBank(NUM_ITEMS, DIM), slice(None))
    moved.load_state_dict(one_bank.state_dict())
    moved_bank(moved, slice(None))
    assert torch.equal(of_ranks[0]["resumed"]["keys"], moved.keys)
    for bank in (MemoryBank(NUM_ITEMS, DIM), ShardedMemoryBank(NUM_ITEMS, DIM)):
        bank.load_state_dict(of_ranks[0]["resumed"])
        assert torch.equal(bank.keys, moved.keys)


@pytest.mark.parametrize("name", METHODS)
def test_methods_train_as_one_process_with_the_whole_bank(of_ranks, name):
    method = build(name, sharded=False)
    alone = train(method, method, slice(None))
    assert set(of_ranks[0][name]) == set(alone)
    for rank, result in enumerate(of_ranks):
        for key, value in result[name].items():
            torch.testing.assert_close(value, alone[key], atol=1e-5, rtol=1e-4, msg=f"{key} on rank {rank}")


def test_ranks_that_disagree_are_told(of_ranks):
    values = [10.0 * rank for rank in range(len(of_ranks))]
    for result in of_ranks:
        assert result["disagreement"] == f"lower has to be the same on all ranks, it is {values}"
