"""IE-CL (Zhang et al. 2026, "Maximizing Incremental Information Entropy for Contrastive Learning")."""

from typing import Literal

from torch import nn

from iecl_fast.ring import RingSchedule
from iecl_fast.ssl.information import InformationTerms
from iecl_fast.ssl.moco import MoCo


class IECL(MoCo):
    """Incremental-entropy contrastive learning: MoCo with SAIB, spectral normalisation and two more terms.

    Algorithm 1, with Q the trained encoder, K its momentum copy, two views of each image, and SAIB g::

        q_anchor = Q(x_anchor)        k_query = K(g(x_query)), without gradient        q_query = Q(g(x_query))
        loss = InfoNCE(q_anchor, k_query, queue) + beta KL(q_query.detach() || q_anchor) - lambda H(q_query)

    plus gamma times SAIB's squared weights, which is a weight decay (:meth:`parameter_groups`). The convolutions of Q
    and K are spectrally normalised. So Q learns from all three terms, and g from the entropy alone.

    What the paper leaves open or contradicts, and what is done here:

    * Equation 16 adds the entropy, where the text maximises it, and its divergence lacks the trace: see
      :mod:`iecl_fast.entropy` for both. The sign and the full divergence are algorithm 1's.
    * It calls the view that MoCo takes for the query the anchor, and the one that becomes the key the query. Names of
      this class are the paper's; ``views`` are in MoCo's order: first the anchor, then the view that SAIB transforms.
    * It reports AdamW with a learning rate of 0.3 and a momentum, which AdamW does not have and 0.3 is far too much
      for. The recipes say what they take.
    * How its weights relate to the width of the embedding: here the terms are per dimension, see
      :class:`~iecl_fast.ssl.information.InformationTerms`.
    * Nothing but gamma holds g back: the divergence, with its queries detached, moves Q alone. In a long training with
      lambda at 0.2 the transformed views may become more than the keys can be found by, which shows as a falling
      ``positive_similarity`` in the log; a smaller lambda mends it.
    * Queue, temperature and momentum are MoCo v2's defaults.

    ``ring`` restricts the negatives as it does in MoCo, which neither paper has.

    Args:
        backbone, num_keys, momentum, temperature, symmetric, ring: as in :class:`~iecl_fast.ssl.MoCo`.
        dim, head, hidden_dim: the paper's projector, three layers of 4096 hidden units and 512 outputs. A small network
            on small data wants a smaller one.
        entropy, kl_variance: as in :class:`~iecl_fast.ssl.information.InformationTerms`.
        entropy_weight: lambda. 0 leaves the term out, and with it all that SAIB learns from.
        kl_weight: beta. 0 leaves the term out.
        saib_weight_decay: gamma.
        terms_interval, jacobian_steps: see :class:`~iecl_fast.ssl.method.Method`. With the interval at 8 a step costs
            little more than MoCo's: the terms take an encoder's pass with gradient, half of what MoCo's step has.
        spectral: normalise every convolution of the encoders.
        saib: g; None leaves the query view as it is, and both terms are of its embeddings.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        dim: int = 512,
        num_keys: int = 65536,
        momentum: float = 0.999,
        temperature: float = 0.2,
        head: Literal["linear", "mlp", "mlp3"] = "mlp3",
        hidden_dim: int | None = 4096,
        symmetric: bool = False,
        spectral: bool = True,
        entropy: Literal["gaussian", "knn", "uniformity"] = "gaussian",
        entropy_weight: float = 0.2,
        kl_weight: float = 0.09,
        kl_variance: Literal["diagonal", "full"] | float = "diagonal",
        saib_weight_decay: float = 1e-4,
        terms_interval: int = 1,
        jacobian_steps: int = 500,
        ring: RingSchedule | None = None,
        saib: nn.Module | None = None,
    ):
        super().__init__(
            backbone,
            dim=dim,
            num_keys=num_keys,
            momentum=momentum,
            temperature=temperature,
            head=head,
            hidden_dim=hidden_dim,
            symmetric=symmetric,
            spectral=spectral,
            entropy_weight=entropy_weight,
            saib_weight_decay=saib_weight_decay,
            terms_interval=terms_interval,
            jacobian_steps=jacobian_steps,
            ring=ring,
            saib=saib,
        )
        self.terms = InformationTerms(
            entropy=entropy,
            entropy_weight=entropy_weight,
            kl_weight=kl_weight,
            kl_variance=kl_variance,
            interval=terms_interval,
        )
