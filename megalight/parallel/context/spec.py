"""What a kind of context-parallel attention must serve, and between which ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.distributed import ProcessGroup

from megalight.errors import LayoutError
from megalight.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class ContextSpec:
    """One attention layer, as the kinds are asked whether they can serve it.

    Attributes:
        cp: how many ranks share each sequence.
        inner: ranks of the inner all-to-all of the two-level kind; None where it was not given.
        heads: query heads and key heads of this rank, or None where the layer does not tell before its first forward.
        causal: a query sees no later key.
        window: a query sees a limited number of earlier keys.
        softcap: scores are capped.
        dropout: attention weights are dropped while training.
        backend: of the attention op, as the layer names it.
    """

    cp: int
    inner: int | None
    heads: tuple[int, int] | None
    causal: bool
    window: bool
    softcap: bool
    dropout: bool
    backend: str


class ContextGroups:
    """The process groups along ``cp``, made on first use: a model can be made parallel, and looked at, without them.

    Args:
        mesh: the grid of ranks.
        inner: how many neighbouring ranks the two-level kind's all-to-all has.
    """

    def __init__(self, mesh: ParallelMesh, inner: int | None = None) -> None:
        self.mesh = mesh
        self.inner_size = inner

    @cached_property
    def all(self) -> ProcessGroup | None:
        """All ranks that share a sequence."""
        return self.mesh.group("cp")

    @cached_property
    def inner(self) -> ProcessGroup | None:
        """Runs of ``inner_size`` neighbours."""
        return self.mesh.group(f"cp%{self._inner_size}")

    @cached_property
    def outer(self) -> ProcessGroup | None:
        """The ranks at the same place of every run."""
        return self.mesh.group(f"cp/{self._inner_size}")

    @property
    def _inner_size(self) -> int:
        if self.inner_size is None:
            raise LayoutError("the two-level kind needs the size of its inner all-to-all; set ContextOptions.inner.")
        return self.inner_size

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextGroups:
        """Copies of a model share it: process groups cannot be copied."""
        return self
