"""What scores are worth: top-k accuracy, the accuracy of each class, and which classes are taken for which."""

import torch


def percent(fraction):
    """A fraction in 0..1 as it is printed."""
    return f"{100 * fraction:.1f} %"


def top_k_accuracies(scores, labels, prefix):
    """Fractions of rows whose label is the best, or among the five best, of the scores.

    Args:
        scores: (N, classes) float. With fewer than five classes the top-5 accuracy is 1.
        labels: (N,) int64.
        prefix: of the names.

    Returns:
        dict ``{prefix}_top1``, ``{prefix}_top5`` of floats.
    """
    hits = _best(scores) == labels[:, None]
    return {
        f"{prefix}_top1": hits[:, 0].double().mean().item(),
        f"{prefix}_top5": hits.any(dim=1).double().mean().item(),
    }


def confusion_matrix(scores, labels):
    """How many rows of each class (first axis) are taken for which (second): (classes, classes) int64 on the CPU.

    Args:
        scores: (N, classes) float; the best is what a row is taken for, as in `top_k_accuracies`.
        labels: (N,) int64, 0 .. classes - 1.
    """
    classes = scores.shape[1]
    taken = _best(scores)[:, 0]
    return torch.bincount((labels * classes + taken).cpu(), minlength=classes**2).view(classes, classes)


def _best(scores):
    """The five classes with the best scores, in this order; one call, so that equal scores are always told alike."""
    return scores.topk(min(5, scores.shape[1]), dim=1).indices


def class_accuracies(confusion):
    """The part of each class that is recognised, a list of floats; None for a class without rows.

    Args:
        confusion: as `confusion_matrix` gives it.
    """
    counts = confusion.sum(dim=1).tolist()
    hits = confusion.diagonal().tolist()
    return [hit / count if count else None for hit, count in zip(hits, counts, strict=True)]
