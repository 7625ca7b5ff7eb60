"""Linear probe against scikit-learn's logistic regression, and that it is a function of the features."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from iecl_fast.evaluate import linear
from iecl_fast.evaluate.accuracy import class_accuracies, confusion_matrix, top_k_accuracies
from iecl_fast.evaluate.linear import fit_classifier, linear_scores


def data(seed, rows, classes=6, channels=20):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, channels, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(classes, (rows,), generator=generator)
    return 3 + centres[labels] + 1.2 * torch.randn(rows, channels, generator=generator), labels


def test_agrees_with_scikit_learn():
    (train, train_labels), (test, test_labels) = data(1, 400), data(2, 300)
    l2 = 1e-2
    ours = linear_scores(train, train_labels, test, num_classes=6, l2=l2, iterations=500)
    scaler = StandardScaler().fit(train.numpy())
    theirs = LogisticRegression(C=1 / (l2 * len(train)), max_iter=5000, tol=1e-8)
    theirs.fit(scaler.transform(train.numpy()), train_labels.numpy())
    expected = theirs.predict_proba(scaler.transform(test.numpy()))
    np.testing.assert_allclose(ours.softmax(1).numpy(), expected, atol=1e-3)
    accuracies = top_k_accuracies(ours, test_labels, "linear")
    assert 0.5 < accuracies["linear_top1"] < accuracies["linear_top5"]


def test_weights_are_those_of_scikit_learn():
    features, labels = data(3, 200)
    features = (features - features.mean(0)) / features.std(0)
    ours = fit_classifier(features, labels, num_classes=6, l2=0.05, iterations=500)
    theirs = LogisticRegression(C=1 / (0.05 * 200), max_iter=5000, tol=1e-10).fit(features.numpy(), labels.numpy())
    # The biases carry no penalty: they are determined up to a constant.
    np.testing.assert_allclose(ours.weight.detach().numpy(), theirs.coef_, atol=1e-4)


def test_blocks_give_the_same_classifier(monkeypatch):
    features, labels = data(3, 200)
    whole = fit_classifier(features, labels, num_classes=6, l2=0.05, iterations=500)
    monkeypatch.setattr(linear, "BLOCK_ROWS", 37)
    parts = fit_classifier(features, labels, num_classes=6, l2=0.05, iterations=500)
    torch.testing.assert_close(parts.weight, whole.weight, atol=1e-4, rtol=0)


def test_same_features_same_bits_whatever_the_random_state():
    features, labels = data(3, 200)
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        results.append(fit_classifier(features, labels, num_classes=6, l2=1e-3, iterations=50).weight)
    assert torch.equal(*results)


def test_a_constant_feature_is_no_trouble():
    (train, train_labels), (test, test_labels) = data(1, 200), data(2, 100)
    train[:, 3] = test[:, 3] = 7.0
    scores = linear_scores(train, train_labels, test, num_classes=6, l2=1e-3, iterations=200)
    assert (scores.argmax(1) == test_labels).float().mean() > 0.5


def test_top_k_counts():
    scores = torch.tensor([[6.0, 5, 4, 3, 2, 1]]).repeat(3, 1)
    assert top_k_accuracies(scores, torch.tensor([0, 4, 5]), "x") == {"x_top1": 1 / 3, "x_top5": 2 / 3}
    assert top_k_accuracies(scores[:, :3], torch.tensor([0, 1, 2]), "x") == {"x_top1": 1 / 3, "x_top5": 1.0}


def test_confusions_and_classes_by_hand():
    scores = torch.eye(4)[[0, 0, 1, 1, 2, 0]]
    labels = torch.tensor([0, 0, 0, 1, 2, 2])
    confusion = confusion_matrix(scores, labels)
    assert confusion.tolist() == [[2, 1, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    assert class_accuracies(confusion) == [2 / 3, 1.0, 0.5, None]
    assert confusion.diagonal().sum() / 6 == pytest.approx(top_k_accuracies(scores, labels, "x")["x_top1"])
