"""Top-k accuracy."""


def top_k_accuracies(scores, labels, prefix):
    """Fractions of rows whose label is the best, or among the five best, of the scores.

    Args:
        scores: (N, classes) float. With fewer than five classes the top-5 accuracy is 1.
        labels: (N,) int64.
        prefix: of the names.

    Returns:
        dict ``{prefix}_top1``, ``{prefix}_top5`` of floats.
    """
    best = scores.topk(min(5, scores.shape[1]), dim=1).indices
    hits = best == labels[:, None]
    return {
        f"{prefix}_top1": hits[:, 0].double().mean().item(),
        f"{prefix}_top5": hits.any(dim=1).double().mean().item(),
    }
