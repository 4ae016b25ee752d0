"""What all tensor-parallel layers of a model share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.ops.parameter import precision_of
from megalight.parallel.context.options import ContextOptions
from megalight.parallel.context.spec import ContextGroups
from megalight.parallel.groups import check_max_ctas, new_group
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.random import RandomStreams
from megalight.parallel.tensor.overlap.kinds import choose
from megalight.parallel.tensor.overlap.options import MAX_CTAS, TensorOptions
from megalight.parallel.tensor.overlap.spec import Overlap, OverlapSpec

Tokens: TypeAlias = Literal["share", "gathered", "whole"]
"""Which tokens a split layer is fed under sequence parallelism: this rank's ``share``, which the layer gathers; all,
``gathered`` by a ``Boundary`` above it, which sums the gradient as well; or the ``whole`` sequence that every rank
holds anyhow. Without sequence parallelism everything is whole."""


@dataclass
class Shared:
    """One object per parallel model.

    Attributes:
        mesh: the grid of ranks.
        sequence_parallel: hidden states between split layers hold this rank's share of the tokens. Read at every
            forward, so that it can be off for a while (decoding).
        sequence_dim: the dim of hidden states that counts tokens.
        context: which kind of attention layers use under context parallelism.
        tensor: how split layers hide their communication.
        context_groups: the ranks along ``cp``.
        streams: random streams for dropout.
        recorded: training steps are recorded as CUDA graphs (:func:`steps_recorded`).
    """

    mesh: ParallelMesh
    sequence_parallel: bool = False
    sequence_dim: int = 0
    context: ContextOptions = field(default_factory=ContextOptions)
    tensor: TensorOptions = field(default_factory=TensorOptions)
    context_groups: ContextGroups = field(init=False)
    streams: RandomStreams = field(init=False)
    recorded: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.context_groups = ContextGroups(self.mesh, self.context.inner)
        self.streams = RandomStreams(self.mesh)
        self._group: ProcessGroup | None = None
        self._splits_tokens = self.sequence_parallel  # also while it is off for decoding
        self._overlaps: dict[tuple[str, OverlapSpec], Overlap] = {}
        self._ways: dict[str, Overlap] = {}

    @property
    def group(self) -> ProcessGroup | None:
        """The ``tp`` group, None for one rank. Made on first use: a model can be split, and looked at, without it.

        Raises:
            ConfigurationError: ``TensorOptions.max_ctas`` is set, and the backend is not NCCL.
        """
        if self._group is None and self.mesh.tp > 1:
            group = self.mesh.group("tp")
            check_max_ctas("TensorOptions.max_ctas", self.tensor.max_ctas, dist.get_backend())
            self._group = group
        return self._group

    @property
    def tp_group(self) -> ProcessGroup:
        """The same, where there are several ranks."""
        assert self.group is not None
        return self.group

    @cached_property
    def message_group(self) -> ProcessGroup:
        """The same ranks, for messages that take few multiprocessors, but at once: products are queued behind them.

        Made on first use, by all of them.
        """
        limit = MAX_CTAS if self.tensor.max_ctas is None else self.tensor.max_ctas
        return new_group(self.mesh.ranks("tp"), "tensor-parallel messages", max_ctas=limit, urgent=True)

    def overlap(self, name: str, x: Tensor, weight: Tensor) -> Overlap:
        """The way to run the products and collectives of the split layer ``name``, for inputs like ``x``.

        Raises:
            LayoutError: the way that was asked for cannot serve.
        """
        spec = self._spec(weight, x.device, x.dtype, self.group)
        kind = self.tensor.kind_of(name)
        if (kind, spec) not in self._overlaps:
            way = choose(name, spec, kind)
            if way.name not in self._ways:
                self._ways[way.name] = way.fn(self)
            self._overlaps[kind, spec] = self._ways[way.name]
        return self._overlaps[kind, spec]

    def check_overlap(self, name: str, weight: Tensor, device: torch.device) -> None:
        """Refuse now, before anything runs, a way that cannot serve a layer.

        Raises:
            LayoutError: says why of each way.
        """
        choose(name, self._spec(weight, device, None, None), self.tensor.kind_of(name))

    def _spec(
        self, weight: Tensor, device: torch.device, dtype: torch.dtype | None, group: ProcessGroup | None
    ) -> OverlapSpec:
        return OverlapSpec(
            self.mesh.tp,
            self._splits_tokens,
            device.type,
            dtype,
            weight.dtype,
            low_precision=precision_of(weight) is not None,
            autocast=torch.is_autocast_enabled(device.type),
            recorded=self.recorded,
            group=group,
        )

    def tokens(self, planned: Tokens) -> Tokens:
        """Which tokens a layer is fed now, where the plan says ``planned`` under sequence parallelism."""
        return planned if self.sequence_parallel else "whole"

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        """Copies of a model share it: process groups cannot be copied."""
        return self


def steps_recorded(model: nn.Module, recorded: bool) -> None:
    """Tell the split layers of ``model`` whether its training steps are recorded as CUDA graphs.

    It decides how they hide communication under ``overlap="auto"``, so call it before the first step, on all ranks.
    """
    for module in model.modules():
        if isinstance(shared := getattr(module, "shared", None), Shared):
            shared.recorded = recorded
