"""What all methods have in common: the batches they refuse, and training in any dtype."""

import pytest
import torch
from small import Pixels

from iecl_fast.ssl import METHODS, LabBackbone, accepts, build_method

N = 6


def build(name):
    backbone, options = Pixels(), {"dim": 4}
    if name == "cmc":
        backbone = LabBackbone(Pixels(1), Pixels(2), mean=(0.5,) * 3, std=(0.25,) * 3)
    for option, value in (
        ("num_images", 20),
        ("num_keys", 16),
        ("num_samples", 8),
        ("hidden_dim", 8),
        ("spectral", False),
    ):
        if accepts(name, option):
            options[option] = value
    if name == "la":
        options |= {"steps_per_epoch": 1, "warm_start": 1, "num_neighbors": 5, "num_clusters": 3}
    return build_method(name, backbone, **options)


def batch(method, dtype=torch.float32):
    return [torch.randn(N, 3, 4, 4, dtype=dtype) for _ in range(method.num_views)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_steps_in_any_dtype(name, dtype):
    method = build(name).to(dtype)
    for _ in range(2):
        losses = method(batch(method, dtype), torch.arange(N))
        sum(losses.values()).backward()
        method.after_step()
        assert all(loss.isfinite() for loss in losses.values())
        gradients = [parameter.grad for parameter in method.parameters() if parameter.grad is not None]
        assert gradients and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda views: [view[:0] for view in views], ValueError, r"one N >= 1 for all, got \(0, 3, 4, 4\)"),
        (lambda views: [*views[:-1], views[-1][0]], ValueError, r"views must have shape .* got .*\(3, 4, 4\)"),
        (lambda views: [view.to(torch.uint8) for view in views], TypeError, r"floating-point .* got torch\.uint8"),
        (lambda views: [view.tolist() for view in views], TypeError, "floating-point tensors .* got list"),
    ],
)
@pytest.mark.parametrize("name", METHODS)
def test_what_is_no_batch_of_images_is_refused(name, change, error, words):
    method = build(name)
    with pytest.raises(error, match=words):
        method(change(batch(method)), torch.arange(N))


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].num_views == 2])
def test_views_of_different_images_are_refused(name):
    method = build(name)
    first, second = batch(method)
    with pytest.raises(ValueError, match=r"one N >= 1 for all, got \(6, 3, 4, 4\), \(5, 3, 4, 4\)"):
        method([first, second[:5]], torch.arange(N))


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        (torch.arange(N, dtype=torch.int32), TypeError, r"index must be an int64 tensor, got torch\.int32"),
        (torch.arange(1), ValueError, r"index must have shape \(6,\), one for each image, got \(1,\)"),
        (list(range(N)), TypeError, "index must be an int64 tensor, got list"),
    ],
)
@pytest.mark.parametrize("name", ["ir", "cmc", "la"])
def test_what_are_no_places_of_images_is_refused(name, index, error, words):
    method = build(name)
    with pytest.raises(error, match=words):
        method(batch(method), index)


@pytest.mark.parametrize("name", ["iecl", "simclr"])
def test_one_image_is_too_few_for_what_compares_images(name):
    method = build(name).eval()  # BatchNorm refuses it, too, in training
    with pytest.raises(ValueError, match="views hold 1 image"):
        method([view[:1] for view in batch(method)])
