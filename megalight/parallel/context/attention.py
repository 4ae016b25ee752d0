"""Context-parallel attention modules: the two-level kind, the registry, and the modules that replace a core."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from megalight.errors import BackendError, LayoutError, nearest
from megalight.nn import DraftAttention, DraftState, InnerAttention, StoredHeads
from megalight.parallel.context import all_gather, all_to_all, ring
from megalight.parallel.context.all_gather import chunks_of, visible_keys
from megalight.parallel.context.all_to_all import exchange_heads, exchange_tokens, heads_why_not, sinks_of
from megalight.parallel.context.spec import ContextGroups, ContextSpec
from megalight.registry import Backend, BackendRegistry
from megalight.types import ContextShare, PackedSequences


def why_not(spec: ContextSpec) -> str | None:
    """Return why it cannot serve a layer, or None: ``inner`` must divide ``cp`` and the heads; the ring must serve.

    See https://arxiv.org/abs/2405.07719. With ``cp = inner * outer`` ranks, the all-to-all runs between ``inner``
    neighbors, for example of one host, so only ``inner`` must divide the heads. It joins their shares to one larger
    share, and the ring has ``outer`` steps instead of ``cp``. Chunks of neighboring ranks are neighbors in the
    sequence, so the joint share is again a zigzag share, one of ``outer``.
    """
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
    mine = exchange_tokens(q, k, v, order, groups.inner)
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
    return exchange_heads(out, order, len(q), groups.inner)


def _joint(share: ContextShare, size: int) -> tuple[PackedSequences, Tensor]:
    """Return the joint share of ``size`` neighbors, and the indices of its tokens in their concatenated shares."""
    joint, _ = share.whole.zigzag(share.rank // size, share.size // size)
    assert joint.context is not None
    context = replace(joint.context, real_lengths=share.real_lengths, num_dummies=share.num_dummies)
    together = PackedSequences.of_lengths(joint.lengths, joint.device)
    neighbors = ContextShare(share.rank % size, size, together, joint.lengths)
    return replace(joint, context=context), neighbors.order


Attend = Callable[..., Tensor]
"""``(inner, q, k, v, sequences, groups) -> [T, H, D]``: :func:`megalight.parallel.context.all_to_all.attend` is one."""

KINDS: BackendRegistry[ContextSpec, Attend] = BackendRegistry("context-parallel attention")

KINDS.register(Backend("all_to_all", all_to_all.attend, 30, all_to_all.why_not))
KINDS.register(Backend("ring", ring.attend, 20, ring.why_not))
KINDS.register(Backend("all_gather", all_gather.attend, 10, all_gather.why_not))
KINDS.register(Backend("all_to_all_ring", attend, 0, why_not))

ONE_LEVEL = frozenset({"auto", "all_to_all", "ring", "all_gather"})
"""Kinds that do not use ``ContextOptions.inner``. ``auto`` is one: it never takes the two-level kind or a plugin's."""


def choose(layer: str, spec: ContextSpec, kind: str) -> Backend[ContextSpec, Attend]:
    """Choose the kind for a layer. ``auto`` takes the kind of the highest priority that can serve.

    Raises:
        LayoutError: no kind can serve, or the named one cannot or does not exist. The message lists the reasons.
    """
    try:
        return KINDS.select(spec, kind)
    except BackendError as error:
        raise LayoutError(f"{layer}: {error}") from error


class ContextAttention(nn.Module):
    """Attention of this rank's share of the tokens to the tokens of all shares.

    In generation, sequences are whole (``sequences.context`` is None), and every rank computes the same with ``inner``.

    Args:
        inner: attention for one device.
        name: name of the module, for messages.
        kind: a name in :data:`megalight.parallel.context.attention.KINDS`, or ``auto``.
        groups: the process groups.
        heads: number of query heads and key heads on this rank. None: known from the first forward on.

    Raises:
        LayoutError: the kind cannot serve the layer.
    """

    def __init__(
        self,
        inner: InnerAttention,
        name: str,
        kind: str,
        groups: ContextGroups,
        heads: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.inner = inner
        self.name = name
        self.kind = kind
        self.groups = groups
        # Keyed by numbers of heads, which may be unknown before the first forward.
        self._chosen: dict[tuple[int, int] | None, Attend] = {}
        if inner.mutual:
            raise LayoutError(
                f"{name}: tokens of an image see each other (mutual), which no kind of context-parallel attention "
                "has; set context_parallel=1."
            )
        self._choose(heads)  # check now, before training

    @property
    def dropout(self) -> float:
        """Probability to drop an attention weight in training."""
        return self.inner.dropout

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: PackedSequences,
        stored: StoredHeads | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """``q [T, H, D], k, v [Tk, Hkv, D], sink [H] -> [T, H, D]``. Only whole sequences are stored.

        Raises:
            LayoutError: the sequences were cut for another number of ranks.
        """
        if sequences.context is None:
            out: Tensor = self.inner(q, k, v, sequences, stored, sink)
            return out
        if sequences.context.size != self.groups.mesh.cp:
            raise LayoutError(
                f"{self.name}: the sequences are cut into {sequences.context.size} shares, but "
                f"cp={self.groups.mesh.cp}; cut them with zigzag(rank, size=cp)."
            )
        more = () if sink is None else (sink,)  # only kinds that serve sinks are chosen then
        return self._choose((q.shape[1], k.shape[1]))(self.inner, q, k, v, sequences, self.groups, *more)

    def _choose(self, heads: tuple[int, int] | None) -> Attend:
        if heads not in self._chosen:
            inner, groups = self.inner, self.groups
            spec = ContextSpec(
                groups.mesh.cp,
                groups.inner_size,
                heads,
                causal=inner.causal,
                window=inner.window is not None,
                chunk=inner.chunk is not None,
                softcap=inner.softcap is not None,
                dropout=inner.dropout > 0,
                softmax=inner.softmax,
                backend=inner.backend,
                auto=self.kind == "auto",
            )
            self._chosen[heads] = choose(self.name, spec, self.kind).fn
        return self._chosen[heads]

    def extra_repr(self) -> str:
        """Show the kind when the module is printed."""
        return f"kind={self.kind}, cp={self.groups.mesh.cp}"


class ContextDraftAttention(nn.Module):
    """Attention of this rank's places to the real tokens of all shares, and to the guesses at these places.

    The real tokens that a guess sees lie in all shares: their keys and values are gathered once, in the first step.
    Earlier guesses at a place are on the rank that holds the place, so later steps need no message
    (:mod:`megalight.ops.draft_attention`).

    Args:
        inner: attention for one device.
        groups: the process groups.
    """

    def __init__(self, inner: DraftAttention, groups: ContextGroups) -> None:
        super().__init__()
        self.inner = inner
        self.groups = groups

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, state: DraftState | None = None
    ) -> Tensor:
        """``q [T, H, D], k, v [T, Hkv, D] -> [T, H, D]``. The state gets the keys and values that are seen."""
        if sequences.context is None:
            out: Tensor = self.inner(q, k, v, sequences, state)
            return out
        if state is None or not state.keys:
            sequences, k, v = visible_keys(k, v, sequences, self.groups)
        else:
            sequences, _ = chunks_of(sequences)
        shared: Tensor = self.inner(q, k, v, sequences, state)
        return shared


@dataclass(frozen=True)
class ContextOptions:
    """The kind of attention of each layer under context parallelism. With cp=1 the options have no effect.

    Attributes:
        kind: name of a kind (``ring``, ``all_gather``, ``all_to_all``, ``all_to_all_ring``), or ``auto``: the kind of
            the highest priority that can serve the layer. Or a mapping from globs over names of attention modules
            (``"*layers.3.*"``) to kinds: the first match counts, and other layers use ``auto``.
        inner: number of neighboring ranks that exchange heads in the two-level kind ``all_to_all_ring``. The ring then
            has ``cp / inner`` steps. Use the number of GPUs of a host.

    Raises:
        LayoutError: there is no such kind, ``inner`` is below 2, or no chosen kind uses it.
    """

    kind: str | Mapping[str, str] = "auto"
    inner: int | None = None

    def __post_init__(self) -> None:
        if self.inner is not None and self.inner < 2:
            raise LayoutError(
                f"ContextOptions has inner={self.inner}; it must be at least 2. Remove it for kinds with one level."
            )
        kinds = {"kind": self.kind} if isinstance(self.kind, str) else self.kind
        for what, kind in kinds.items():
            try:
                KINDS.check(kind)
            except BackendError as error:
                raise LayoutError(f"ContextOptions({what!r}): {error}") from error
        # Only if no pattern names a kind with two levels: one layer that uses `inner` is enough.
        if self.inner is not None and ONE_LEVEL.issuperset(kinds.values()):
            raise LayoutError(
                f"inner={self.inner} is used only by the kind 'all_to_all_ring', but ContextOptions has "
                f"{', '.join(map(repr, kinds.values())) or 'no kind'}. Use that kind, for all layers or by a pattern, "
                "or remove inner."
            )

    def kind_of(self, name: str) -> str:
        """Return the kind for the attention module ``name``."""
        if isinstance(self.kind, str):
            return self.kind
        return next((kind for pattern, kind in self.kind.items() if fnmatch.fnmatchcase(name, pattern)), "auto")

    def check(self, names: Iterable[str]) -> None:
        """Check that every pattern matches one of the attention modules ``names``.

        Raises:
            LayoutError: a pattern matches none.
        """
        names = list(names)
        for pattern in [] if isinstance(self.kind, str) else self.kind:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise LayoutError(
                    f"the context-parallel pattern {pattern!r} matches no attention module; correct or remove it. "
                    f"There are {', '.join(names[:3]) or 'none'}{' ...' if names[3:] else ''}."
                    + nearest(pattern, names)
                )
