"""Two levels: all-to-all over heads between neighbours, a ring between the runs of neighbours (arXiv 2405.07719).

With ``cp = inner * outer`` ranks, the all-to-all stays among ``inner`` neighbours, say of one host, and needs heads for
these only. It turns their shares into one larger share, whose ring has ``outer`` steps instead of ``cp``: chunks of
neighbours are neighbours in the sequence, so what they hold together is again a zigzag share, of ``outer``.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megalight.nn import InnerAttention
from megalight.parallel.context import ring
from megalight.parallel.context.exchange import heads_why_not, trade_heads, trade_tokens
from megalight.parallel.context.spec import ContextGroups, ContextSpec
from megalight.types import ContextShare, PackedSequences


def why_not(spec: ContextSpec) -> str | None:
    """The inner size must be given and divide; heads must divide by it; and all that the ring refuses."""
    if spec.inner is None:
        return "needs the size of its all-to-all; set ContextOptions.inner"
    if spec.cp % spec.inner or spec.inner == spec.cp:
        return (
            f"cannot cut cp={spec.cp} into rings between runs of inner={spec.inner}; it must divide cp and be smaller"
        )
    return heads_why_not(spec, spec.inner) or ring.why_not(spec)


def attend(
    inner: InnerAttention, q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, groups: ContextGroups
) -> Tensor:
    """This rank's share of attention: ``q [T, H, D], k, v [T, Hkv, D] -> [T, H, D]``."""
    share = sequences.context
    assert share is not None and groups.inner is not None
    size = groups.inner.size()
    joint, order = share.once(("two_level", size), _joint, share, size)
    mine = trade_tokens(q, k, v, order, groups.inner)
    out = ring.ring_attention(*mine, joint, groups.outer, causal=inner.causal, scale=inner.scale, backend=inner.backend)
    return trade_heads(out, order, len(q), groups.inner)


def _joint(share: ContextShare, size: int) -> tuple[PackedSequences, Tensor]:
    """What ``size`` neighbours hold together, as one share, and where its tokens lie among theirs."""
    joint, _ = share.whole.zigzag(share.rank // size, share.size // size)
    assert joint.context is not None
    context = replace(joint.context, real_lengths=share.real_lengths, num_dummies=share.num_dummies)
    neighbours = ContextShare(share.rank % size, size, PackedSequences.of_lengths(joint.lengths), joint.lengths)
    return replace(joint, context=context), neighbours.order
