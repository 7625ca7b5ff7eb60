"""What SAIB computes: output and every gradient against float64, layouts, determinism."""

import pytest
import torch
import torch.nn.functional as F

from accuracy import assert_as_accurate, joined
from iecl_fast.saib import reference, saib
from saib.problems import Problem, output_and_gradients
from torch_threads import torch_threads

NAMES = ("output", "x", "position", "w1", "w2", "w3", "w4")
PROBLEMS = [
    Problem("batch", (5, 3, 6, 9), 3),
    Problem("batch", (20, 3, 16, 12), 4),
    Problem("batch", (33, 3, 8, 24), 2, "silu"),
    Problem("batch", (21, 3, 12, 20), 4, "silu"),
    Problem("batch", (2, 3, 14, 14), 7, "silu"),
    Problem("batch", (6, 3, 5, 3), 1, positional=False),
    Problem("batch", (7, 3, 12, 12), 4, expansion="monotone"),
    Problem("patch", (3, 3, 6, 9), 3),
    Problem("patch", (5, 3, 20, 12), 4),
    Problem("patch", (4, 3, 10, 6), 2, "silu"),
    Problem("patch", (2, 3, 14, 14), 7, positional=False),
    Problem("patch", (1, 3, 5, 7), 1),
    Problem("patch", (4, 3, 8, 12), 4, expansion="monotone"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_output_and_gradients_are_as_accurate_as_plain_pytorch(problem, dtype):
    ours, plain, truth = [], [], []
    for seed in range(8):
        tensors = problem.tensors(seed, dtype)
        ours.append(output_and_gradients(problem.ours, tensors))
        plain.append(output_and_gradients(problem.plain, tensors))
        truth.append(output_and_gradients(problem.plain, tensors, torch.float64))
    for got, exact, same_dtype in zip(joined(ours), joined(truth), joined(plain)):
        assert got.dtype == dtype
        assert_as_accurate(got, exact, same_dtype)


@pytest.mark.parametrize(
    "problem", [Problem("batch", (96, 3, 32, 32), 4), Problem("patch", (40, 3, 32, 32), 8)], ids=str
)
def test_large_problems_are_as_accurate(problem):
    """Several bands, several parts of the Winograd domain, sums that are shared out."""
    tensors = problem.tensors()
    ours = output_and_gradients(problem.ours, tensors)
    plain = output_and_gradients(problem.plain, tensors)
    truth = output_and_gradients(problem.plain, tensors, torch.float64)
    for got, exact, same_dtype in zip(ours, truth, plain):
        assert_as_accurate(got, exact, same_dtype)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_float64_is_exact(problem):
    tensors = problem.tensors(dtype=torch.float64)
    torch.testing.assert_close(
        output_and_gradients(problem.ours, tensors),
        output_and_gradients(problem.plain, tensors),
        rtol=1e-10,
        atol=1e-11,
    )


@pytest.mark.parametrize("expansion", ["free", "monotone"])
@pytest.mark.parametrize("channels", ["batch", "patch"])
def test_gradients_are_those_of_finite_differences(channels, expansion):
    problem = Problem(channels, (2, 3, 4, 2), 2, "silu" if expansion == "free" else "relu", expansion)
    tensors = [None if t is None else t.requires_grad_() for t in problem.tensors(3, torch.float64)]
    given = [t for t in tensors if t is not None]

    def function(*leaves):
        remaining = iter(leaves)
        return problem.ours(*(None if t is None else next(remaining) for t in tensors))

    assert torch.autograd.gradcheck(function, given)


@pytest.mark.parametrize(("height", "width", "p"), [(8, 8, 4), (6, 15, 3), (5, 7, 1), (14, 7, 7)])
def test_patches_are_those_of_unfold_and_come_back_exactly(height, width, p):
    x = torch.randn(3, 3, height, width)
    patches = reference.patchify(x, p)
    unfolded = torch.nn.Unfold(p, stride=p)(x)  # (N, 3 p p, patches)
    assert torch.equal(patches, unfolded.unflatten(1, (3, p * p)).transpose(2, 3).flatten(1, 2))
    assert torch.equal(reference.unpatchify(patches, p, 3, height, width), x)
    grid = reference.to_channels(patches, p, x.shape, channels_are_batch=False)
    assert torch.equal(grid.flatten(2), unfolded)
    assert torch.equal(reference.from_channels(grid, p, x.shape, channels_are_batch=False), patches)


@pytest.mark.parametrize("channels", ["batch", "patch"])
def test_written_with_the_modules_of_pytorch(channels):
    """An independent definition: nn.Unfold, F.conv2d, nn.Fold."""
    problem = Problem(channels, (6, 3, 12, 8), 4)
    x, position, w1, w2, w3, w4 = problem.tensors(dtype=torch.float64)
    patches = torch.nn.Unfold(4, stride=4)(x).unflatten(1, (3, 16)).transpose(2, 3).reshape(6, 18, 16) + position
    if channels == "batch":
        image = patches[None]
    else:
        image = patches.unflatten(1, (3, 3, 2)).permute(0, 1, 4, 2, 3).reshape(6, 48, 3, 2)
    h = F.relu(F.conv2d(F.relu(F.conv2d(F.relu(F.conv2d(image, w1)), w2, padding=1)), w3))
    image = image + F.conv2d(h, w4)
    columns = image[0].unflatten(1, (3, 6)).transpose(2, 3).flatten(1, 2) if channels == "batch" else image.flatten(2)
    expected = x + torch.nn.Fold((12, 8), 4, stride=4)(columns)
    torch.testing.assert_close(problem.ours(x, position, w1, w2, w3, w4), expected)


def layouts(x):
    wide = torch.full((*x.shape[:3], 2 * x.shape[3]), torch.nan, dtype=x.dtype)
    wide[..., ::2] = x
    return {
        "contiguous": x.clone(),
        "channels last": x.clone(memory_format=torch.channels_last),
        "pixel stride": wide[..., ::2],
        "transposed": x.transpose(2, 3).contiguous().transpose(2, 3),
        "batch last": x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("problem", [Problem("batch", (6, 3, 8, 12), 4), Problem("patch", (6, 3, 8, 12), 4)], ids=str)
def test_any_layout_of_images_and_gradients_gives_the_same_bits(problem, dtype):
    x, *weights = problem.tensors(dtype=dtype)
    gradient = torch.randn_like(x)
    expected = output_and_gradients(problem.ours, [x, *weights], gradient=gradient)
    for name, image in layouts(x).items():
        for slope in layouts(gradient).values():
            results = output_and_gradients(problem.ours, [image, *weights], gradient=slope)
            assert all(map(torch.equal, results, expected)), name
            assert results[0].stride() == results[1].stride() == torch.empty_like(image).stride()
    channels_last = output_and_gradients(problem.ours, [layouts(x)["channels last"], *weights])[0]
    assert channels_last.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("problem", [Problem("batch", (6, 3, 8, 12), 4), Problem("patch", (6, 3, 8, 12), 4)], ids=str)
def test_weights_of_any_layout_give_the_same_bits(problem):
    x, position, *weights = problem.tensors()
    expected = output_and_gradients(problem.ours, [x, position, *weights])
    moved = [weight.to(memory_format=torch.channels_last) for weight in weights]
    transposed = position.T.contiguous().T
    assert all(map(torch.equal, output_and_gradients(problem.ours, [x, transposed, *moved]), expected))


@pytest.mark.parametrize("problem", PROBLEMS[:1] + PROBLEMS[7:8], ids=str)
def test_gradient_of_a_sum(problem):
    """Its gradient is one number with all strides 0."""
    tensors = [None if t is None else t.requires_grad_() for t in problem.tensors()]
    gradients = [torch.autograd.grad(f(*tensors).sum(), tensors) for f in (problem.ours, problem.plain)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("expansion", ["free", "monotone"])
@pytest.mark.parametrize("channels", ["batch", "patch"])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (4,), (0, 3), (1, 2, 4)], ids=str)
def test_only_what_is_asked_for_gets_a_gradient(channels, expansion, wanted):
    problem = Problem(channels, (6, 3, 8, 12), 4, expansion=expansion)
    tensors = problem.tensors()
    present = [tensor for tensor in tensors if tensor is not None]
    everything = output_and_gradients(problem.ours, tensors)[1:]
    for place in wanted:
        present[place].requires_grad_()
    gradient = torch.randn(problem.shape, generator=torch.Generator().manual_seed(1))
    problem.ours(*tensors).backward(gradient)
    for place, tensor in enumerate(present):
        assert (tensor.grad is None) == (place not in wanted)
        if place in wanted:
            assert torch.equal(tensor.grad, everything[place])


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_inputs_are_never_written(problem):
    tensors = problem.tensors()
    before = [None if tensor is None else tensor.clone() for tensor in tensors]
    gradient = torch.randn(problem.shape)
    kept = gradient.clone()
    leaves = [None if tensor is None else tensor.requires_grad_() for tensor in tensors]
    output = problem.ours(*leaves)
    first = torch.autograd.grad(output, [t for t in leaves if t is not None], gradient, retain_graph=True)
    again = torch.autograd.grad(output, [t for t in leaves if t is not None], gradient)
    assert all(map(torch.equal, first, again)) and torch.equal(gradient, kept)
    assert all(a is None or torch.equal(a, b) for a, b in zip(tensors, before))


@pytest.mark.parametrize(
    "problem",
    [
        Problem("batch", (20, 3, 32, 32), 4),
        Problem("batch", (64, 3, 32, 32), 4),
        Problem("batch", (12, 3, 32, 32), 4, expansion="monotone"),
        Problem("patch", (64, 3, 32, 32), 4),
        Problem("patch", (3, 3, 32, 32), 16),
    ],
    ids=str,
)
def test_same_bits_in_every_run_on_any_number_of_threads(problem):
    tensors = problem.tensors()
    results = []
    for threads in (1, 2, 3, 1, 2):
        with torch_threads(threads):
            results.append(output_and_gradients(problem.ours, tensors))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("expansion", ["free", "monotone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_images(dtype, expansion):
    problem = Problem("patch", (0, 3, 8, 12), 4, expansion=expansion)
    output, of_x, *others = output_and_gradients(problem.ours, problem.tensors(dtype=dtype))
    assert output.shape == of_x.shape == problem.shape
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in others)


def test_nan_and_infinity_come_through():
    problem = Problem("batch", (4, 3, 8, 8), 4)
    x, *weights = problem.tensors()
    x[1, 2, 3, 4] = torch.nan
    x[2, 0, 0, 0] = torch.inf
    ours, plain = problem.ours(x, *weights), problem.plain(x, *weights)
    assert torch.equal(ours.isfinite().flatten(1).all(1), plain.isfinite().flatten(1).all(1))
    assert ours[1, 2, 3, 4].isnan()


def test_a_block_without_gradient_keeps_nothing():
    problem = Problem("batch", (4, 3, 8, 8), 4)
    tensors = [tensor.requires_grad_() for tensor in problem.tensors()]
    with torch.no_grad():
        assert not problem.ours(*tensors).requires_grad
    _, saved = torch.ops.iecl_fast.saib(*(t.detach() for t in tensors), *problem.operator_options, False)
    assert saved == []
    with pytest.raises(RuntimeError, match="save = False"):
        torch.ops.iecl_fast.saib(*tensors, *problem.operator_options, False)


def test_functional_form_has_the_modules_defaults():
    problem = Problem("batch", (4, 3, 8, 8), 4)
    tensors = problem.tensors()
    assert torch.equal(saib(*tensors, patch_size=4), problem.ours(*tensors))
