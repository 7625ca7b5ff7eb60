"""What all methods with SAIB and spectral normalisation have in common."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from iecl_fast.entropy import effective_rank
from iecl_fast.ring import RingSchedule
from iecl_fast.spectral import SpectralNormHandle, spectral_norm
from iecl_fast.ssl.information import InformationTerms, entropy_per_dimension
from iecl_fast.ssl.stepped import Stepped

JACOBIAN_IMAGES, JACOBIAN_PROBES, JACOBIAN_STEPS = 2, 4, 24


class Method(Stepped):
    """Base of a method of self-supervised learning.

    One training step::

        losses = method(views, index)
        sum(losses.values()).backward()
        optimizer.step()
        method.after_step()

    A subclass sets ``encoder`` by :meth:`set_encoder` and defines ``forward``.

    Args:
        saib: block that transforms one of the two views, (N, 3, H, W) -> (N, 3, H, W), such as
            :class:`iecl_fast.SAIB`; or None.
        entropy_weight: of the entropy of the transformed view's embeddings, which the block learns from
            (:class:`~iecl_fast.ssl.information.InformationTerms`); without a block there is no such term.
        jacobian_steps: measure ``log|det J|`` of the block in ``diagnostics`` when so many steps have passed since the
            last time; 0 never does. It takes a few hundred passes through the block.
        saib_weight_decay: of the block's parameters, in place of the optimiser's own (the paper's gamma, up to the
            factor 2 of the derivative).
        terms_interval: steps from one that has the terms to the next, where they count so many times: see there. 1 is
            the paper's.
        contrast_reaches_saib: whether the block also learns from the method's own loss. A block that learns from
            nothing stays as it was initialised: its parameters are frozen, so that neither an optimiser nor
            DistributedDataParallel waits for gradients that never come.
        ring: percentiles of the negatives, in a method that has negatives; None takes all of them.

    Attributes:
        num_views: 2.
        encoder: :class:`~iecl_fast.ssl.Encoder`, the trained branch.
        step: calls of ``after_step`` and ``skip_step`` so far.
    """

    num_views = 2
    encoder: nn.Module

    def __init__(
        self,
        *,
        saib: nn.Module | None,
        entropy_weight: float,
        jacobian_steps: int,
        saib_weight_decay: float,
        terms_interval: int = 1,
        contrast_reaches_saib: bool = False,
        ring: RingSchedule | None = None,
    ):
        super().__init__(ring)
        for name, value in (("saib_weight_decay", saib_weight_decay), ("jacobian_steps", jacobian_steps)):
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        self.saib = saib
        self.saib_weight_decay = saib_weight_decay
        self.contrast_reaches_saib = contrast_reaches_saib
        self.terms = InformationTerms(entropy_weight=entropy_weight, interval=terms_interval)
        if saib is None:
            self.terms.entropy_weight = 0.0
        self.jacobian_steps = jacobian_steps
        if saib is not None:
            saib.requires_grad_(contrast_reaches_saib or entropy_weight > 0)
        if self._measures_jacobian():
            # The last figures and when they were taken: a resumed run logs what the uninterrupted one does.
            self.register_buffer("jacobian", torch.zeros(2, dtype=torch.float64))
            self.register_buffer("jacobian_step", torch.full((), -1))
        self._embeddings: dict[str, Tensor] = {}  # of the last forward pass, for diagnostics
        self._images = torch.zeros(0)  # what the block saw in it, as many as its Jacobian is measured at
        self.look_up_step()

    def set_encoder(self, encoder: nn.Module, spectral: bool) -> None:
        """Take the trained branch, with its convolutions normalised if so wished."""
        if spectral:
            spectral_norm(encoder)
        self.encoder = encoder
        self.spectral = spectral

    @property
    def backbone(self) -> nn.Module:
        """The trained branch's backbone, which evaluation uses."""
        return self.encoder.backbone

    def transform(self, images: Tensor) -> Tensor:
        """The images after SAIB, where there is one."""
        if self.saib is None:
            return images
        if self._measures_jacobian():
            whole_batch = self.saib.channels == "batch"
            self._images = images.detach() if whole_batch else images[:JACOBIAN_IMAGES].detach().clone()
        with torch.set_grad_enabled(torch.is_grad_enabled() and (self.has_terms() or self.contrast_reaches_saib)):
            return self.saib(images)

    def has_terms(self) -> bool:
        """Whether the terms are computed at the current step."""
        return self.terms.active and self._terms_are_due

    def look_up_step(self) -> None:
        super().look_up_step()
        self._terms_are_due = self.terms.interval == 1 or int(self.step) % self.terms.interval == 0

    def information(self, transformed: Tensor, anchors: Tensor) -> dict[str, Tensor]:
        """The information terms of the transformed view's images (N, 3, H, W), beside the other's embeddings (N, C)."""
        if not self.has_terms():
            return self._terms_between()
        learns = torch.is_grad_enabled() and self.terms.entropy_weight > 0  # the divergence detaches the queries
        with self.transformed_view(), torch.set_grad_enabled(learns):
            queries = self.encoder(transformed)
        return self.information_of(queries, anchors)

    def information_of(self, queries: Tensor, anchors: Tensor) -> dict[str, Tensor]:
        """The information terms of the transformed view's embeddings (N, C), beside the other's."""
        if not self.has_terms():
            return self._terms_between()
        self._embeddings["queries"] = queries.detach()
        return self.terms(queries, anchors)

    def _terms_between(self) -> dict[str, Tensor]:
        if not self.terms.active:
            return {}
        losses = self.terms.between()
        if "entropy" in losses and self.saib is not None:
            # A gradient of 0, not none: optimisers and DistributedDataParallel see the same parameters at every step.
            losses["entropy"] = losses["entropy"] + 0 * sum(parameter.sum() for parameter in self.saib.parameters())
        return losses

    def mean_losses(self, halves: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Of the halves of a symmetric loss, name by name."""
        losses = {name: sum(half[name] for half in halves) / len(halves) for name in halves[0]}
        if self.training and self.terms.interval > 1 and self.has_terms():
            self.terms.remember(losses)
        return losses

    @contextmanager
    def transformed_view(self) -> Iterator[None]:
        """Context in which the encoder's BatchNorm normalises by the batch as always, but does not note its statistics.

        Evaluation meets images that no block has transformed. A block about doubles the images (its last skip), so
        running statistics of both views together would fit neither.
        """
        if self.saib is None:
            yield
            return
        norms = [module for module in self.encoder.modules() if isinstance(module, _BatchNorm)]
        before = [norm.track_running_stats for norm in norms]
        for norm in norms:
            norm.track_running_stats = False
        try:
            yield
        finally:
            for norm, tracked in zip(norms, before):
                norm.track_running_stats = tracked

    def after_step(self) -> None:
        """Count the step. Call it after ``optimizer.step()``, on every rank."""
        self.count_step()

    def skip_step(self) -> None:
        """In place of :meth:`after_step` where the optimiser took no step: count it, and learn nothing from it."""
        self.count_step()

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Trained parameters as an optimiser takes them: SAIB's have a weight decay of their own."""
        of_saib = [] if self.saib is None else [p for p in self.saib.parameters() if p.requires_grad]
        known = {id(parameter) for parameter in of_saib}
        others = [p for p in self.parameters() if p.requires_grad and id(p) not in known]
        groups = [{"params": others, "weight_decay": weight_decay}]
        if of_saib:
            groups.append({"params": of_saib, "weight_decay": self.saib_weight_decay})
        return groups

    @torch.no_grad()
    def diagnostics(self) -> dict[str, float]:
        """Figures of the last forward pass for the log. Reads device memory, so it synchronises.

        ``entropy_anchor`` and ``entropy_query`` are of the embeddings without and with SAIB, by
        :func:`~iecl_fast.ssl.information.entropy_per_dimension`; ``effective_rank`` of those without;
        ``positive_similarity`` is the mean cosine of the pairs; ``sigma`` is the mean over the layers of what their
        weights are divided by. ``jacobian`` is the last measurement of the block's log|det J| in nats per dimension,
        the constant log 2 of its last skip taken off, ``jacobian_error`` its standard error.
        """
        figures = {}
        if self._embeddings and len(self._embeddings["anchors"]) > 1:
            anchors, others = self._embeddings["anchors"], self._embeddings["others"]
            figures["positive_similarity"] = float((anchors * others).sum(dim=1).mean())
            figures["effective_rank"] = float(effective_rank(anchors))
            figures["entropy_anchor"] = float(entropy_per_dimension(anchors))
            if self.terms.active and self.terms.interval > 1:
                figures["entropy_query"] = float(self.terms.values[-1])
            elif "queries" in self._embeddings:
                figures["entropy_query"] = float(entropy_per_dimension(self._embeddings["queries"]))
        if self._measures_jacobian() and len(self._images):
            if self.jacobian_step < 0 or self.step - self.jacobian_step >= self.jacobian_steps:
                self._measure_jacobian()
            figures |= dict(zip(("jacobian", "jacobian_error"), self.jacobian.tolist()))
        if self.spectral:
            sigmas = torch.stack(list(SpectralNormHandle(self.encoder).sigma().values()))
            figures["sigma"] = float(sigmas.mean())
        return figures

    def _measures_jacobian(self) -> bool:
        return self.jacobian_steps > 0 and hasattr(self.saib, "log_abs_det_jacobian")

    def _measure_jacobian(self) -> None:
        generator = torch.Generator(self._images.device).manual_seed(int(self.step))
        measured = self.saib.log_abs_det_jacobian(
            self._images, num_probes=JACOBIAN_PROBES, num_steps=JACOBIAN_STEPS, generator=generator
        )
        # Images are independent of each other, so their errors are.
        error = measured.standard_error.square().mean().sqrt() / measured.standard_error.numel() ** 0.5
        self.jacobian.copy_(torch.stack([measured.without_scale.mean(), error]))
        self.jacobian_step.copy_(self.step)
