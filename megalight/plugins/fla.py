"""flash-linear-attention: the gated delta rule in its Triton kernels.

This module imports nothing of the package; the backend does when its name is asked for.
"""

from __future__ import annotations

from torch import Tensor

from megalight.ops.common import HALF, wide
from megalight.ops.delta_rule import DELTA_RULE, DeltaRuleSpec
from megalight.plugins.package import Package
from megalight.registry import Backend
from megalight.types import PackedSequences

PACKAGE = Package("fla", "flash-linear-attention", "pip install flash-linear-attention")
MINIMUM = "0.2"
"""The first version whose tensors are ``[B, T, H, D]``."""
RULE = "fla.ops.gated_delta_rule:chunk_gated_delta_rule"
WIDEST = 256


def why_not(spec: DeltaRuleSpec) -> str | None:
    """Return why it cannot serve, or None."""
    if spec.dtype not in HALF:
        return f"serves bfloat16 and float16, not {spec.dtype}"
    if spec.key_dim > WIDEST:
        return f"serves keys of at most {WIDEST} features, not {spec.key_dim}"
    return PACKAGE.why_not(spec.device, "delta_rule", RULE, minimum=MINIMUM)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, sequences: PackedSequences) -> Tensor:
    """See :func:`megalight.ops.delta_rule.delta_rule`."""
    # Older versions want as many heads of queries and keys as of values.
    per = v.shape[1] // q.shape[1]
    queries, keys = (rows.to(v.dtype).repeat_interleave(per, 1) if per > 1 else rows.to(v.dtype) for rows in (q, k))
    # The logarithms of decays in a wide dtype: they are summed over chunks.
    rows = (queries, keys, v, decay.to(wide(v.dtype)), beta.to(v.dtype))
    if sequences.uniform is not None:
        batch = sequences.uniform[0]
        out, _ = PACKAGE.load(RULE)(*(t.reshape(batch, -1, *t.shape[1:]) for t in rows), scale=1.0)
        return out.flatten(0, 1)  # type: ignore[no-any-return]
    offsets = sequences.cu_seqlens.long()
    out, _ = PACKAGE.load(RULE)(*(t[None] for t in rows), scale=1.0, cu_seqlens=offsets)
    return out[0]  # type: ignore[no-any-return]


PRIORITY = 0
"""Unused: backends of plugins are chosen only by name."""


def register() -> None:
    """Add the backend."""
    DELTA_RULE.register(Backend("fla", delta_rule, PRIORITY, why_not))
