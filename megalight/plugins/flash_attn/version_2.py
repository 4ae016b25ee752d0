"""flash-attn 2 (https://arxiv.org/abs/2307.08691)."""

from __future__ import annotations

from torch import Tensor

from megalight.ops.attention import Spec
from megalight.plugins.flash_attn import call
from megalight.plugins.package import Package
from megalight.types import PackedSequences

PACKAGE = Package("flash_attn", "flash-attn", "pip install --no-build-isolation 'megalight[flash-attn]'")
MINIMUM = "2.6"
"""The first with a soft cap on scores."""


def why_not(spec: Spec) -> str | None:
    """Why attention cannot be served."""
    return call.why_not(PACKAGE, "flash_attn", spec, MINIMUM)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """Everything that the op can ask for."""
    options = {
        "dropout_p": dropout,
        "softmax_scale": scale,
        "causal": causal,
        "window_size": (-1 if window is None else window, 0 if causal else -1),
        "softcap": softcap or 0.0,
    }
    return call.call(PACKAGE, "flash_attn", q, k, v, sequences, options)
