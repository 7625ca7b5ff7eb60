"""Features in the plane: by UMAP where it is installed, else by scikit-learn's t-SNE."""

import warnings

import numpy as np

from iecl_fast.engine.errors import RunError

FEWEST = 10  # points of which a neighbourhood can be spoken
SEED = 0
COLLAPSED = 1e-5  # unit features that are all within this of their mean lie in one point


def project(features):
    """Lay unit features out in the plane, near what is near. Seeded: the same features give the same picture.

    Args:
        features: (n, C) float32 array of unit rows.

    Returns:
        (points (n, 2) float64 in 0..1, of which the longer side takes all; how it was done, in words).

    Raises:
        RunError: there are too few, or all are the same.
    """
    if len(features) < FEWEST:
        raise RunError(f"there are {len(features)} test images, a picture of their features needs {FEWEST}")
    if np.linalg.norm(features - features.mean(axis=0), axis=1).max() < COLLAPSED:
        raise RunError("all features are the same: the encoder has collapsed")
    try:
        from umap import UMAP
    except ImportError:
        points, words = _tsne(features)
    else:
        points, words = _umap(UMAP, features)
    points = points.astype(np.float64)
    low, high = points.min(axis=0), points.max(axis=0)
    return 0.5 + (points - (low + high) / 2) / (high - low).max(), words


def _umap(umap, features):
    neighbors = min(15, len(features) - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own settings: few points, one thread because of the seed
        points = umap(n_neighbors=neighbors, metric="cosine", random_state=SEED, n_jobs=1).fit_transform(features)
    return points, f"UMAP, {neighbors} neighbours, seed {SEED}"


def _tsne(features):
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(features) - 1) / 3)
    points = TSNE(perplexity=perplexity, init="pca", random_state=SEED).fit_transform(features)
    return points, f"t-SNE, perplexity {perplexity:.3g}, seed {SEED}"
