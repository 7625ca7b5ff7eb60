"""Linear probe: multinomial logistic regression on frozen features."""

import torch
from torch.nn import functional

from iecl_fast.evaluate.probe import zero_classifier

BLOCK_ROWS = 16384  # rows that are held in float64 at a time


def linear_scores(train_features, train_labels, test_features, *, num_classes, l2, iterations):
    """Fit a linear classifier on the training features and apply it to the test features.

    The features are standardised with the training set's mean and deviation. The objective, mean cross entropy
    + l2/2 * |W|^2, is convex; L-BFGS from zero has no learning rate and no random numbers, so the same features give
    the same accuracy. This is not the papers' SGD with augmented images, which costs a training of its own.

    Args:
        train_features, test_features: (n, C), (m, C) float32.
        train_labels: (n,) int64, 0 .. num_classes - 1.
        num_classes: number of classes.
        l2: >= 0.
        iterations: at most so many of L-BFGS.

    Returns:
        scores (m, num_classes) float64.
    """
    deviation, mean = torch.std_mean(train_features, dim=0, correction=0)
    scale = deviation.clamp_min(1e-6)  # a constant feature becomes 0
    classifier = fit_classifier(
        (train_features - mean) / scale, train_labels, num_classes=num_classes, l2=l2, iterations=iterations
    )
    with torch.no_grad():
        return classifier(((test_features - mean) / scale).double())


def fit_classifier(features, labels, *, num_classes, l2, iterations):
    """The float64 `nn.Linear` (C -> num_classes) that minimises the regularised cross entropy over features (n, C).

    In float64, because the line search of L-BFGS stops early on the rounding errors of a float32 objective.
    """
    classifier = zero_classifier(features.shape[1], num_classes, features.device, torch.float64)
    optimizer = torch.optim.LBFGS(
        classifier.parameters(),
        max_iter=iterations,
        tolerance_grad=1e-5,
        history_size=10,
        line_search_fn="strong_wolfe",
    )

    def objective():
        optimizer.zero_grad()
        total = 0.5 * l2 * classifier.weight.square().sum()
        total.backward()
        total = total.detach()
        for rows, targets in zip(features.split(BLOCK_ROWS), labels.split(BLOCK_ROWS), strict=True):
            loss = functional.cross_entropy(classifier(rows.double()), targets, reduction="sum") / len(features)
            loss.backward()
            total += loss.detach()
        return total

    optimizer.step(objective)
    return classifier
