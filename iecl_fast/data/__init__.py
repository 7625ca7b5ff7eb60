"""Data sets and views; needs torchvision and scikit-learn."""

from iecl_fast.data.datasets import (
    DATASETS,
    DatasetInfo,
    LabelledImages,
    balanced_rows,
    build_dataset,
    dataset_info,
    default_root,
)
from iecl_fast.data.readable import Readable
from iecl_fast.data.statistics import channel_statistics
from iecl_fast.data.views import (
    GaussianBlur,
    ViewsDataset,
    evaluation_transform,
    pixel_transform,
    training_transform,
    view_options,
)

__all__ = [
    "DATASETS",
    "DatasetInfo",
    "GaussianBlur",
    "LabelledImages",
    "Readable",
    "ViewsDataset",
    "balanced_rows",
    "build_dataset",
    "channel_statistics",
    "dataset_info",
    "default_root",
    "evaluation_transform",
    "pixel_transform",
    "training_transform",
    "view_options",
]
