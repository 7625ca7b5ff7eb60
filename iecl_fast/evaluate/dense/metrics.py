"""Mean average precision of boxes, masks and keypoints; intersection over union of a segmentation."""

import contextlib
import io

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torchmetrics.classification import MulticlassConfusionMatrix
from torchmetrics.detection import MeanAveragePrecision

from iecl_fast.evaluate.dense.voc import UNLABELLED

KINDS = {"faster_rcnn": ("bbox",), "mask_rcnn": ("bbox", "segm"), "keypoint_rcnn": ("bbox",)}
WORDS = {"bbox": "box", "segm": "mask"}
MASK_THRESHOLD = 0.5


class DetectionMetric:
    """COCO's average precision: over IoU 0.50, 0.55 .. 0.95 (AP), at 0.50 (AP50), at 0.75 (AP75).

    Objects that the data says to ignore are treated as COCO's crowds: a detection within one is not counted.

    Args:
        model: of `DetectSettings`: which kinds there are.
        classes: names of the classes 1 .. n.
    """

    def __init__(self, model, classes):
        self.kinds, self.classes = KINDS[model], classes
        self._objects = MeanAveragePrecision(iou_type=self.kinds, class_metrics=True)
        self._objects.warn_on_many_detections = False
        self._keypoints = KeypointPrecision() if model == "keypoint_rcnn" else None

    def update(self, predictions, targets):
        """Add images.

        Args:
            predictions: list of dicts as torchvision's models give them: boxes (n, 4), labels (n,), scores (n,), and
                masks (n, 1, H, W) in 0..1, keypoints (n, K, 3), keypoints_scores (n, K).
            targets: list of dicts as `DetectionImages` gives them when not for training.
        """
        predictions = [_on_cpu(prediction) for prediction in predictions]
        targets = [_on_cpu(target) for target in targets]
        if self._keypoints is not None:
            self._keypoints.update(predictions, targets)
        for prediction in predictions:
            if "masks" in prediction:
                prediction["masks"] = prediction["masks"][:, 0] > MASK_THRESHOLD
        targets = [target | ({"masks": target["masks"].bool()} if "masks" in target else {}) for target in targets]
        self._objects.update(predictions, targets)

    def compute(self):
        """dict: "box_map", "box_map50", "box_map75" in 0..1, "box_map_per_class" by name, and the like for "mask" and
        "keypoint". None stands where there is no object to be found."""
        computed = self._objects.compute()
        result = {}
        for kind in self.kinds:
            prefix, word = "" if len(self.kinds) == 1 else f"{kind}_", WORDS[kind]
            for name, key in (("", "map"), ("50", "map_50"), ("75", "map_75")):
                result[f"{word}_map{name}"] = _or_none(computed[f"{prefix}{key}"].item())
            labels = computed["classes"].reshape(-1).tolist()
            values = computed[f"{prefix}map_per_class"].reshape(-1).tolist()
            result[f"{word}_map_per_class"] = {
                self.classes[label - 1]: _or_none(value) for label, value in zip(labels, values)
            }
        if self._keypoints is not None:
            result |= self._keypoints.compute()
        return result


class KeypointPrecision:
    """Average precision over object keypoint similarity, as COCO's own evaluation computes it.

    The similarity of a point falls with its distance over the object's size and over a constant of the point: COCO's
    own for its 17 points, and 0.05, the middle of those, for each point of other data.
    """

    OTHER_SIGMA = 0.05

    def __init__(self):
        self._images, self._objects, self._detections = [], [], []
        self._num_keypoints = 0

    def update(self, predictions, targets):
        """Add images, on the CPU; see `DetectionMetric.update`."""
        for prediction, target in zip(predictions, targets):
            number = len(self._images) + 1
            self._images.append({"id": number})
            for row, points in enumerate(target["keypoints"]):
                self._num_keypoints = len(points)
                left, upper, right, lower = target["boxes"][row].tolist()
                self._objects.append(
                    {
                        "id": len(self._objects) + 1,
                        "image_id": number,
                        "category_id": target["labels"][row].item(),
                        "bbox": [left, upper, right - left, lower - upper],
                        "area": target["area"][row].item(),
                        "iscrowd": target["iscrowd"][row].item(),
                        "keypoints": points.flatten().tolist(),
                        "num_keypoints": int((points[:, 2] > 0).sum()),
                    }
                )
            for row, points in enumerate(prediction["keypoints"]):
                self._detections.append(
                    {
                        "image_id": number,
                        "category_id": prediction["labels"][row].item(),
                        "keypoints": points.flatten().tolist(),
                        "score": prediction["scores"][row].item(),
                    }
                )

    def compute(self):
        """dict: "keypoint_map", "keypoint_map50", "keypoint_map75"; None where there are no keypoints to be found."""
        names = ("keypoint_map", "keypoint_map50", "keypoint_map75")
        if not self._detections:
            to_find = any(found["num_keypoints"] for found in self._objects)
            return dict.fromkeys(names, 0.0 if to_find else None)
        categories = {entry["category_id"] for entry in (*self._objects, *self._detections)}
        with contextlib.redirect_stdout(io.StringIO()):  # they print what they do
            truth = COCO()
            truth.dataset = {
                "images": self._images,
                "annotations": self._objects,
                "categories": [{"id": category} for category in sorted(categories)],
                "info": {},
            }
            truth.createIndex()
            evaluation = COCOeval(truth, truth.loadRes(self._detections), "keypoints")
            sigmas = evaluation.params.kpt_oks_sigmas
            if self._num_keypoints != len(sigmas):
                evaluation.params.kpt_oks_sigmas = np.full(self._num_keypoints, self.OTHER_SIGMA)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        return {name: _or_none(value) for name, value in zip(names, evaluation.stats[:3].tolist())}


class SegmentationMetric:
    """Intersection over union of each class over all pixels of all images, and its mean over classes.

    Pixels without a class (255) count nowhere. A class that is neither there nor predicted has no value and no part in
    the mean.

    Args:
        classes: names of the classes 1 .. n; 0 is the background, which counts as one.
        device: of the scores.
    """

    def __init__(self, classes, device):
        self.classes = ("background", *classes)
        self._confusion = MulticlassConfusionMatrix(len(self.classes), ignore_index=UNLABELLED).to(device)

    def update(self, scores, masks):
        """Add images: scores (N, classes, H, W), masks (N, H, W) int64."""
        self._confusion.update(scores.argmax(dim=1), masks)

    def compute(self):
        """dict: "miou" and "pixel_accuracy" in 0..1, "iou_per_class" by name."""
        confusion = self._confusion.compute().double()
        right = confusion.diagonal()
        union = confusion.sum(dim=0) + confusion.sum(dim=1) - right
        there = union > 0
        values = dict(zip(self.classes, (right / union).tolist()))
        return {
            "miou": (right[there] / union[there]).mean().item() if there.any() else None,
            "pixel_accuracy": (right.sum() / confusion.sum()).item() if there.any() else None,
            "iou_per_class": {name: value for (name, value), seen in zip(values.items(), there.tolist()) if seen},
        }


def _on_cpu(tensors):
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def _or_none(value):
    """COCO's -1 for what cannot be measured as None."""
    return None if value < 0 else value
