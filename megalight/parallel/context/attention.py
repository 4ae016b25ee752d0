"""The module that takes the place of attention proper under context parallelism."""

from __future__ import annotations

from torch import Tensor, nn

from megalight.errors import LayoutError
from megalight.nn import InnerAttention, KeysAndValues
from megalight.parallel.context.kinds import Attend, choose
from megalight.parallel.context.spec import ContextGroups, ContextSpec
from megalight.types import PackedSequences


class ContextAttention(nn.Module):
    """Attention of a share of the tokens to all shares, by one of the kinds; of whole sequences as ever.

    Whole sequences (``sequences.context`` is None) come in generation, where every rank computes the same.

    Args:
        inner: attention of one device.
        name: of the module, for messages.
        kind: a name in :data:`megalight.parallel.context.kinds.KINDS`, or ``auto``.
        groups: the ranks.
        heads: query and key heads of this rank, where they are known; else the first forward tells.

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
        self._chosen: dict[tuple[int, int] | None, Attend] = {}
        self._choose(heads)  # raises now what can be known now

    @property
    def dropout(self) -> float:
        """Probability of dropping an attention weight while training."""
        return self.inner.dropout

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, state: KeysAndValues | None = None
    ) -> Tensor:
        """``q [T, H, D], k, v [Tk, Hkv, D] -> [T, H, D]``. Only whole sequences have a state.

        Raises:
            LayoutError: the sequences were cut for another number of ranks.
        """
        if sequences.context is None:
            out: Tensor = self.inner(q, k, v, sequences, state)
            return out
        if sequences.context.size != self.groups.mesh.cp:
            raise LayoutError(
                f"{self.name}: the sequences are cut into {sequences.context.size} shares, but "
                f"cp={self.groups.mesh.cp}; cut them with zigzag(rank, size=cp)."
            )
        return self._choose((q.shape[1], k.shape[1]))(self.inner, q, k, v, sequences, self.groups)

    def _choose(self, heads: tuple[int, int] | None) -> Attend:
        if heads not in self._chosen:
            inner, groups = self.inner, self.groups
            spec = ContextSpec(
                groups.mesh.cp,
                groups.inner_size,
                heads,
                causal=inner.causal,
                window=inner.window is not None,
                softcap=inner.softcap is not None,
                dropout=inner.dropout > 0,
                backend=inner.backend,
            )
            self._chosen[heads] = choose(self.name, spec, self.kind).fn
        return self._chosen[heads]

    def extra_repr(self) -> str:
        """The kind, for printing."""
        return f"kind={self.kind}, cp={self.groups.mesh.cp}"
