"""What all tensor-parallel layers of a model share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.distributed import ProcessGroup

from megalight.parallel.context.options import ContextOptions
from megalight.parallel.context.spec import ContextGroups
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.plan import Tokens
from megalight.parallel.random import RandomStreams


@dataclass
class Shared:
    """One object per parallel model.

    Attributes:
        mesh: the grid of ranks.
        sequence_parallel: hidden states between split layers hold this rank's share of the tokens. Read at every
            forward, so that it can be off for a while (decoding).
        sequence_dim: the dim of hidden states that counts tokens.
        context: which kind of attention layers use under context parallelism.
        context_groups: the ranks along ``cp``.
        streams: random streams for dropout.
    """

    mesh: ParallelMesh
    sequence_parallel: bool = False
    sequence_dim: int = 0
    context: ContextOptions = field(default_factory=ContextOptions)
    context_groups: ContextGroups = field(init=False)
    streams: RandomStreams = field(init=False)

    def __post_init__(self) -> None:
        self.context_groups = ContextGroups(self.mesh, self.context.inner)
        self.streams = RandomStreams(self.mesh)
        self._group: ProcessGroup | None = None

    @property
    def group(self) -> ProcessGroup | None:
        """The ``tp`` group, None for one rank. Made on first use: a model can be split, and looked at, without it."""
        if self._group is None and self.mesh.tp > 1:
            self._group = self.mesh.group("tp")
        return self._group

    def tokens(self, planned: Tokens) -> Tokens:
        """Which tokens a layer is fed now, where the plan says ``planned`` under sequence parallelism."""
        return planned if self.sequence_parallel else "whole"

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        """Copies of a model share it: process groups cannot be copied."""
        return self
