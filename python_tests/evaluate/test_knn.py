"""Weighted kNN against scikit-learn and against a table worked by hand."""

import math

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from iecl_fast.evaluate import knn
from iecl_fast.evaluate.knn import knn_accuracy


def clusters(seed, rows, classes=7, channels=12, noise=1.5):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, channels, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(classes, (rows,), generator=generator)
    return centres[labels] + noise * torch.randn(rows, channels, generator=generator), labels


@pytest.mark.parametrize("k", [1, 5, 40])
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_agrees_with_scikit_learn(k, temperature):
    (train, train_labels), (test, test_labels) = clusters(1, 300), clusters(2, 200)
    ours = knn_accuracy(train, train_labels, test, test_labels, num_classes=7, k=k, temperature=temperature)
    theirs = KNeighborsClassifier(k, metric="cosine", weights=lambda distance: np.exp(-distance / temperature))
    theirs.fit(train.double().numpy(), train_labels.numpy())
    predicted = theirs.predict(test.double().numpy())
    assert ours["knn_top1"] == pytest.approx((predicted == test_labels.numpy()).mean(), abs=1e-12)
    assert 0.3 < ours["knn_top1"] < ours["knn_top5"] <= 1
    assert ours["knn_k"] == k
    assert ours["knn_temperature"] == temperature


def test_one_close_neighbour_outvotes_two_far_ones():
    train = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, -0.8]])
    query = torch.tensor([[2.0, 0.0]])
    votes = knn._votes(torch.nn.functional.normalize(query), train, torch.tensor([0, 1, 1]), 2, 3, 0.5)
    assert votes.tolist() == [pytest.approx([1.0, 2 * math.exp(-0.4 / 0.5)])]


def test_k_is_clipped_and_that_is_recorded():
    train, labels = clusters(1, 20)
    assert knn_accuracy(train, labels, train, labels, num_classes=7, k=200)["knn_k"] == 20


def test_blocks_do_not_change_the_result(monkeypatch):
    (train, train_labels), (test, test_labels) = clusters(1, 100), clusters(2, 53)
    whole = knn_accuracy(train, train_labels, test, test_labels, num_classes=7, k=9)
    monkeypatch.setattr(knn, "BLOCK_ELEMENTS", 1000)
    assert knn_accuracy(train, train_labels, test, test_labels, num_classes=7, k=9) == whole


def test_small_temperature_and_zero_features_stay_finite():
    train, labels = clusters(1, 50)
    train[0] = 0
    votes = knn._votes(torch.zeros(1, 12), train, labels, 7, 50, 1e-3)
    assert torch.isfinite(votes).all()
    result = knn_accuracy(train, labels, train, labels, num_classes=7, k=10, temperature=1e-3)
    assert result["knn_top1"] > 0.95
