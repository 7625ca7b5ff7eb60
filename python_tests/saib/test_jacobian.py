"""log|det J|: exact against autograd's Jacobian, stochastic against exact, and what its sign is."""

import math

import pytest
import torch

from iecl_fast import SAIB
from iecl_fast.saib import reference


def block_and_images(channels: str, expansion: str = "free", n: int = 4, **options) -> tuple[SAIB, torch.Tensor]:
    block = SAIB(channels, n, 2, (4, 6), expansion=expansion, **options)
    return block, torch.randn(n, 3, 4, 6)


def jacobian(block: SAIB, x: torch.Tensor) -> torch.Tensor:
    """autograd's, of the module itself in float64."""
    size = x.numel()
    return torch.autograd.functional.jacobian(block.double(), x.double()).reshape(size, size)


@pytest.mark.parametrize("cascade", [1, 2])
@pytest.mark.parametrize("expansion", ["free", "monotone"])
def test_exact_equals_slogdet_of_autograds_jacobian(expansion, cascade):
    for channels in ("batch", "patch"):
        block, x = block_and_images(channels, expansion, cascade=cascade)
        figures = block.log_abs_det_jacobian(x)
        assert figures.exact and torch.equal(figures.standard_error, torch.zeros_like(figures.whole))
        if channels == "batch":
            assert figures.whole.shape == () and figures.dimensions == x.numel()
            expected = torch.linalg.slogdet(jacobian(block, x))[1]
            torch.testing.assert_close(figures.whole * x.numel(), expected)
        else:
            assert figures.whole.shape == (4,) and figures.dimensions == x[0].numel()
            expected = torch.stack([torch.linalg.slogdet(jacobian(block, image[None]))[1] for image in x])
            torch.testing.assert_close(figures.whole * x[0].numel(), expected)
        torch.testing.assert_close(
            figures.whole - figures.without_scale, torch.full_like(expected, math.log(2)) * cascade
        )


@pytest.mark.parametrize("expansion", ["free", "monotone"])
@pytest.mark.parametrize("channels", ["batch", "patch"])
def test_stochastic_is_within_three_standard_errors_for_20_seeds(channels, expansion):
    block, x = block_and_images(channels, expansion, n=2)
    exact = block.log_abs_det_jacobian(x)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        estimate = block.log_abs_det_jacobian(x, exact=False, num_probes=32, num_steps=40, generator=generator)
        assert not estimate.exact and (estimate.standard_error > 0).all()
        assert (estimate.standard_error < 0.1).all()
        assert ((estimate.whole - exact.whole).abs() <= 3 * estimate.standard_error).all(), seed


def test_stochastic_repeats_with_its_seed_and_survives_more_steps_than_dimensions():
    block, x = block_and_images("patch", n=2)
    first, second = (
        block.log_abs_det_jacobian(
            x, exact=False, num_probes=4, num_steps=100, generator=torch.Generator().manual_seed(3)
        )
        for _ in range(2)
    )
    assert torch.equal(first.whole, second.whole) and first.whole.isfinite().all()


def test_zero_branch_is_twice_the_image():
    block, x = block_and_images("batch")
    torch.nn.init.zeros_(block.w4)
    for exact in (True, False):
        figures = block.log_abs_det_jacobian(x, exact=exact)
        torch.testing.assert_close(figures.whole, torch.tensor(math.log(2), dtype=torch.float64))
        torch.testing.assert_close(figures.without_scale, torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("channels", ["batch", "patch"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_monotone_never_loses_entropy(channels, scale):
    """Weights far from where they start, also of one sign, also none."""
    for seed in range(5):
        torch.manual_seed(seed)
        block, x = block_and_images(channels, "monotone")
        with torch.no_grad():
            for number, weight in enumerate((block.w1, block.w2, block.w3)):
                weight.copy_(
                    scale * torch.randn_like(weight) if seed < 4 else -scale * torch.rand_like(weight) * number
                )
        figures = block.log_abs_det_jacobian(x * 3)
        assert (figures.without_scale >= -1e-12).all()
        matrix = jacobian(block, x * 3)
        torch.testing.assert_close(matrix, matrix.T, rtol=1e-9, atol=1e-9 * matrix.abs().max().item())
        assert torch.linalg.eigvalsh(matrix).min() >= 2 - 1e-9 * matrix.abs().max()


def test_free_can_lose_entropy():
    """The paper's proof does not hold: random weights give either sign."""
    signs = set()
    for seed in range(12):
        torch.manual_seed(seed)
        block, x = block_and_images("batch")
        figures = block.log_abs_det_jacobian(x)
        signs.add(bool(figures.without_scale < 0))
    assert signs == {True, False}
    with torch.no_grad():
        # A branch that undoes the skips.
        x = x.abs()
        for weight in (block.w1, block.w2, block.w3, block.w4):
            weight.zero_()
        block.position.zero_()
        for i in range(4):
            block.w1[i, i] = block.w2[i, i, 1, 1] = block.w3[i, i] = 1
            block.w4[i, i] = -1.9
    figures = block.log_abs_det_jacobian(x)
    assert figures.whole.item() == pytest.approx(math.log(0.1))
    assert figures.without_scale.item() == pytest.approx(math.log(0.05))


def test_leaves_no_trace():
    block, x = block_and_images("patch")
    x.requires_grad_()
    figures = block.log_abs_det_jacobian(x)
    assert x.grad is None and all(p.grad is None for p in block.parameters())
    assert not figures.whole.requires_grad and block.w1.dtype == torch.float32
    lower = block.bfloat16().log_abs_det_jacobian(x.bfloat16())
    torch.testing.assert_close(lower.whole, figures.whole, atol=0.05, rtol=0)


def test_errors():
    block, x = block_and_images("patch")
    with pytest.raises(ValueError, match="num_probes = 1 .*at least 2"):
        block.log_abs_det_jacobian(x, exact=False, num_probes=1)
    with pytest.raises(ValueError, match="num_steps = 0 .*at least 1"):
        block.log_abs_det_jacobian(x, exact=False, num_steps=0)
    with pytest.raises(ValueError, match="no images"):
        block.log_abs_det_jacobian(x[:0])
    with pytest.raises(ValueError, match="built for 4 x 6"):
        block.log_abs_det_jacobian(x.transpose(2, 3))


def test_reference_needs_no_kernel():
    block, x = block_and_images("batch")
    weights = block.position, block.w1, block.w2, block.w3, block.w4
    torch.testing.assert_close(reference.saib(x, *weights, 2, True, "relu", "free"), block(x), rtol=1e-4, atol=1e-4)
