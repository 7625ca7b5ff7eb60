"""Local aggregation (LA; Zhuang et al. 2019), a baseline with neighbours of its own in place of a ring."""

from typing import Literal

import torch
import torch.distributed as dist
from sklearn.cluster import KMeans
from torch import Tensor, nn

from iecl_fast.exchange import world_size
from iecl_fast.ring import ring_sample
from iecl_fast.ssl.encoders import check_counts
from iecl_fast.ssl.instance import InstanceDiscrimination

IMAGES_PER_CLUSTER = 43  # the paper's 30000 clusters of ImageNet's 1281167 images
ITERATIONS = 25


class LocalAggregation(InstanceDiscrimination):
    """Images of one cluster move together, away from the others that are near.

    Zhuang, Zhai and Yamins, "Local Aggregation for Unsupervised Learning of Visual Embeddings": of an image's
    background neighbours B, the entries of the bank that are most similar to its embedding, those that share a cluster
    with it in any of several k-means runs are close, C. The loss is -log(P(B and C) / P(B)), P(A) being the sum of
    exp(s / T) over A. The image's own entry is counted in both, so that neither is empty. Training starts as instance
    discrimination, since neighbours among random embeddings say nothing; the clusters are computed anew in regular
    distances.

    k-means is scikit-learn's on the CPU, from random starts and with at most 25 iterations: seconds for tens of
    thousands of images, hours for ImageNet's million and 30000 clusters.

    Args:
        backbone, num_images, dim, num_samples, momentum, temperature, head: as in
            :class:`iecl_fast.ssl.instance.InstanceDiscrimination`; ``num_samples`` is of the warm start.
        steps_per_epoch: optimiser steps of an epoch, to which the options in epochs are converted.
        num_neighbors: background neighbours beside the own entry; clipped to the other K - 1 entries.
        num_clusters: of each run of k-means; None takes one for each 43 images, as in the paper.
        num_clusterings: runs of k-means, whose close sets are joined.
        warm_start: epochs of instance discrimination, at least one step.
        recluster: epochs from one clustering to the next, at least one step.

    Attributes:
        labels: (num_clusterings, K) int32 buffer, each entry's cluster in each run; -1 before the first.
    """

    labels: Tensor
    warm_steps: int = 1  # at least; the first step is looked up before it is known

    def __init__(
        self,
        backbone: nn.Module,
        *,
        num_images: int,
        steps_per_epoch: int,
        dim: int = 128,
        num_samples: int = 4096,
        momentum: float = 0.5,
        temperature: float = 0.07,
        head: Literal["linear", "mlp"] = "linear",
        num_neighbors: int = 4096,
        num_clusters: int | None = None,
        num_clusterings: int = 10,
        warm_start: float = 10.0,
        recluster: float = 1.0,
    ):
        super().__init__(
            backbone,
            num_images=num_images,
            dim=dim,
            num_samples=num_samples,
            momentum=momentum,
            temperature=temperature,
            head=head,
        )
        check_counts(steps_per_epoch=steps_per_epoch, num_neighbors=num_neighbors, num_clusterings=num_clusterings)
        for name, value in (("warm_start", warm_start), ("recluster", recluster)):
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        self.num_clusters = max(1, num_images // IMAGES_PER_CLUSTER) if num_clusters is None else num_clusters
        if not 1 <= self.num_clusters <= num_images:
            raise ValueError(f"num_clusters must lie in 1..{num_images}, the number of images, got {num_clusters}")
        self.num_neighbors = min(num_neighbors, num_images - 1)
        self.warm_steps = max(1, round(warm_start * steps_per_epoch))
        self.recluster_steps = max(1, round(recluster * steps_per_epoch))
        self.register_buffer("labels", torch.full((num_clusterings, num_images), -1, dtype=torch.int32))
        self._close_share = torch.tensor(0.0)

    def look_up_step(self) -> None:
        super().look_up_step()
        self._warms_up = int(self.step) < self.warm_steps

    def after_step(self) -> None:
        """Also cluster the bank anew when it is time. Call it after ``optimizer.step()``, on every rank."""
        super().after_step()
        self._cluster_when_due()

    def skip_step(self) -> None:
        """In place of ``after_step`` where the optimiser took no step: count it; the clusters come in time."""
        super().skip_step()
        self._cluster_when_due()

    def _cluster_when_due(self) -> None:
        steps = int(self.step) - self.warm_steps
        if steps >= 0 and steps % self.recluster_steps == 0:
            self._cluster()

    def diagnostics(self) -> dict[str, float]:
        """Figures of the last forward pass: ``close_share`` is the part of the neighbours that are close."""
        return {
            "positive_similarity": float(self.contrast.positive_similarity),
            "close_share": float(self._close_share),
        }

    def _loss(self, queries: Tensor, index: Tensor) -> Tensor:
        if self._warms_up:
            return super()._loss(queries, index)
        with torch.autocast(queries.device.type, enabled=False):
            own = (queries * self.contrast.bank.entries(index)).sum(dim=1, keepdim=True)
            self.contrast.positive_similarity = own.detach().mean()
            similarities, neighbours = self._neighbours(queries, index)
            close = (self.labels[:, neighbours] == self.labels[:, index, None]).any(dim=0)
            self._close_share = close.float().mean()
            logits = torch.cat([own, similarities], dim=1) / self.contrast.temperature
            far = torch.nn.functional.pad(~close, (1, 0))  # the own entry is close
            return (logits.logsumexp(dim=1) - logits.masked_fill(far, -torch.inf).logsumexp(dim=1)).mean()

    def _neighbours(self, queries: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Similarities and indices (N, num_neighbors) of the most similar other entries."""
        others = self.contrast.bank.num_items - 1
        # Half a rank below the first one kept: rounding up gives it exactly, whatever the division loses.
        lower = max(0.0, 100 * (others - self.num_neighbors - 0.5) / others)
        keys = self.contrast.bank.keys.to(queries.dtype)
        return ring_sample(queries, keys, lower, 100, exclude=index, return_indices=True)

    def _cluster(self) -> None:
        """Label the bank's entries. Rank 0 does it for all: sums in another order could tell entries apart."""
        ranks = world_size()
        if ranks == 1 or dist.get_rank() == 0:
            keys = self.contrast.bank.keys.float().cpu().numpy()
            for run, labels in enumerate(self.labels):
                # Other starts in each run and at each time, the same ones in a resumed training.
                seed = (int(self.step) * len(self.labels) + run) % 2**32
                kmeans = KMeans(self.num_clusters, init="random", n_init=1, max_iter=ITERATIONS, random_state=seed)
                labels.copy_(torch.from_numpy(kmeans.fit_predict(keys)))
        if ranks > 1:
            dist.broadcast(self.labels, src=0)
