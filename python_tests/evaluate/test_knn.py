"""Weighted kNN against scikit-learn and against a table worked by hand."""

import math

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from iecl_fast.evaluate import knn
from iecl_fast.evaluate.knn import knn_scores


def clusters(seed, rows, classes=7, channels=12, noise=1.5):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, channels, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(classes, (rows,), generator=generator)
    return centres[labels] + noise * torch.randn(rows, channels, generator=generator), labels


@pytest.mark.parametrize("k", [1, 5, 40])
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_agrees_with_scikit_learn(k, temperature):
    (train, train_labels), (test, test_labels) = clusters(1, 300), clusters(2, 200)
    scores = knn_scores(train, train_labels, test, num_classes=7, k=k, temperature=temperature)
    theirs = KNeighborsClassifier(k, metric="cosine", weights=lambda distance: np.exp(-distance / temperature))
    theirs.fit(train.double().numpy(), train_labels.numpy())
    assert scores.argmax(1).tolist() == theirs.predict(test.double().numpy()).tolist()
    shares = scores / scores.sum(1, keepdim=True)
    np.testing.assert_allclose(shares.numpy(), theirs.predict_proba(test.double().numpy()), atol=1e-5)
    assert 0.3 < (scores.argmax(1) == test_labels).float().mean() < 1


def test_one_close_neighbour_outvotes_two_far_ones():
    train = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, -0.8]])
    query = torch.tensor([[2.0, 0.0]])
    votes = knn._votes(torch.nn.functional.normalize(query), train, torch.tensor([0, 1, 1]), 2, 3, 0.5)
    assert votes.tolist() == [pytest.approx([1.0, 2 * math.exp(-0.4 / 0.5)])]


def test_blocks_do_not_change_the_result(monkeypatch):
    (train, train_labels), (test, _) = clusters(1, 100), clusters(2, 53)
    options = {"num_classes": 7, "k": 9, "temperature": 0.07}
    whole = knn_scores(train, train_labels, test, **options)
    monkeypatch.setattr(knn, "BLOCK_ELEMENTS", 1000)
    blocks = knn_scores(train, train_labels, test, **options)
    assert torch.equal(blocks.argmax(1), whole.argmax(1))
    torch.testing.assert_close(blocks, whole)


def test_small_temperature_and_zero_features_stay_finite():
    train, labels = clusters(1, 50)
    train[0] = 0
    votes = knn._votes(torch.zeros(1, 12), train, labels, 7, 50, 1e-3)
    assert torch.isfinite(votes).all()
    scores = knn_scores(train, labels, train, num_classes=7, k=10, temperature=1e-3)
    assert (scores.argmax(1) == labels).float().mean() > 0.95
