"""The module that replaces a layer's inner attention under context parallelism."""

from __future__ import annotations

from torch import Tensor, nn

from megalight.errors import LayoutError
from megalight.nn import InnerAttention, KeysAndValues
from megalight.parallel.context.kinds import Attend, choose
from megalight.parallel.context.spec import ContextGroups, ContextSpec
from megalight.types import PackedSequences


class ContextAttention(nn.Module):
    """Attention of this rank's share of the tokens to the tokens of all shares.

    In generation, sequences are whole (``sequences.context`` is None), and every rank computes the same with ``inner``.

    Args:
        inner: attention for one device.
        name: name of the module, for messages.
        kind: a name in :data:`megalight.parallel.context.kinds.KINDS`, or ``auto``.
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
        state: KeysAndValues | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """``q [T, H, D], k, v [Tk, Hkv, D], sink [H] -> [T, H, D]``. Only whole sequences have a state.

        Raises:
            LayoutError: the sequences were cut for another number of ranks.
        """
        if sequences.context is None:
            out: Tensor = self.inner(q, k, v, sequences, state, sink)
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
