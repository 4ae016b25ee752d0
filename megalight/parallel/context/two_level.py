"""Two levels: all-to-all over heads between neighbors, and a ring between groups of neighbors.

See https://arxiv.org/abs/2405.07719. With ``cp = inner * outer`` ranks, the all-to-all runs between ``inner``
neighbors, for example of one host, so only ``inner`` must divide the heads. It joins their shares to one larger share,
and the ring has ``outer`` steps instead of ``cp``. Chunks of neighboring ranks are neighbors in the sequence, so the
joint share is again a zigzag share, one of ``outer``.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megalight.nn import InnerAttention
from megalight.parallel.context import ring
from megalight.parallel.context.exchange import heads_why_not, sinks_of, trade_heads, trade_tokens
from megalight.parallel.context.spec import ContextGroups, ContextSpec
from megalight.types import ContextShare, PackedSequences


def why_not(spec: ContextSpec) -> str | None:
    """Return why it cannot serve a layer, or None: ``inner`` must divide ``cp`` and the heads; the ring must serve."""
    if spec.inner is None:
        return "needs the size of its all-to-all; set ContextOptions.inner"
    if spec.cp % spec.inner or spec.inner == spec.cp:
        return f"has inner={spec.inner} for cp={spec.cp}; inner must divide cp and be smaller"
    return heads_why_not(spec, spec.inner) or ring.why_not(spec)


def attend(
    inner: InnerAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences,
    groups: ContextGroups,
    sink: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's share: ``q [T, H, D], k, v [T, Hkv, D], sink [H] -> [T, H, D]``."""
    share = sequences.context
    assert share is not None and groups.inner is not None
    size = groups.inner.size()
    joint, order = share.once(("two_level", size), _joint, share, size)
    # After it, a rank holds all tokens of its run of neighbors, of its heads only: `[inner T, H / inner, D]`.
    mine = trade_tokens(q, k, v, order, groups.inner)
    out = ring.ring_attention(
        *mine,
        joint,
        groups.outer,
        causal=inner.causal,
        scale=inner.scale,
        sink=inner.sinks(mine[0], sinks_of(sink, groups.inner)),
        window=inner.window,
        chunk=inner.chunk,
        backend=inner.backend,
    )
    return trade_heads(out, order, len(q), groups.inner)


def _joint(share: ContextShare, size: int) -> tuple[PackedSequences, Tensor]:
    """Return the joint share of ``size`` neighbors, and the indices of its tokens in their concatenated shares."""
    joint, _ = share.whole.zigzag(share.rank // size, share.size // size)
    assert joint.context is not None
    context = replace(joint.context, real_lengths=share.real_lengths, num_dummies=share.num_dummies)
    together = PackedSequences.of_lengths(joint.lengths, joint.device)
    neighbors = ContextShare(share.rank % size, size, together, joint.lengths)
    return replace(joint, context=context), neighbors.order
