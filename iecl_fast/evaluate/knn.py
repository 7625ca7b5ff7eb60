"""Weighted k-nearest-neighbour classification on frozen features (Wu et al., 2018, section 3.4)."""

import torch
from torch.nn import functional

BLOCK_ELEMENTS = 2**24  # float32: 64 MiB for the similarities of one block of test rows


def knn_scores(train_features, train_labels, test_features, *, num_classes, k, temperature):
    """Each of the k most similar training features votes for its class with weight exp(similarity / temperature).

    Similarity is the cosine. The test rows come in blocks, so that no (tests, trains) matrix is held.

    Args:
        train_features, test_features: (n, C), (m, C) float32.
        train_labels: (n,) int64, 0 .. num_classes - 1.
        num_classes: number of classes.
        k: neighbours, at most n.
        temperature: > 0.

    Returns:
        votes (m, num_classes) float32, all scaled by exp(-1 / temperature).
    """
    train_features = functional.normalize(train_features, dim=1)
    test_features = functional.normalize(test_features, dim=1)
    rows = max(1, BLOCK_ELEMENTS // max(len(train_features), k * num_classes))
    blocks = test_features.split(rows)
    return torch.cat([_votes(block, train_features, train_labels, num_classes, k, temperature) for block in blocks])


def _votes(block, train_features, train_labels, num_classes, k, temperature):
    """Weighted votes (rows, num_classes) of a block of unit test features."""
    similarities, neighbours = (block @ train_features.T).topk(k, dim=1)
    weights = ((similarities - 1) / temperature).exp()  # - 1: at most 1 at any temperature; the order is the same
    # A product with one-hot rows, and not scatter_add, whose sums on a GPU come in no fixed order.
    votes = functional.one_hot(train_labels[neighbours], num_classes).to(weights.dtype)  # [rows, k, classes]
    return torch.bmm(weights[:, None], votes)[:, 0]
