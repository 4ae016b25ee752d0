"""The interface of context-parallel attention: a request, its process groups, and selection of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.errors import LayoutError
from megalight.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class ContextSpec:
    """An attention layer that a kind must serve.

    Attributes:
        cp: number of ranks that share each sequence.
        inner: ranks of the inner all-to-all of the two-level kind; None if not given.
        heads: number of query heads and key heads on this rank; None if unknown before the first forward.
        causal: whether a query sees no later key.
        window: whether a query sees only a limited number of earlier keys.
        chunk: whether a query sees only keys of its own chunk.
        softcap: whether scores are capped.
        dropout: whether attention weights are dropped in training.
        softmax: ``vanilla``, or one of the kinds with sinks.
        backend: the layer's backend of the attention op.
        auto: whether the kind is to be chosen. If not, the layer's kind was named.
    """

    cp: int
    inner: int | None
    heads: tuple[int, int] | None
    causal: bool
    window: bool
    chunk: bool
    softcap: bool
    dropout: bool
    softmax: str
    backend: str
    auto: bool = False


class ContextGroups:
    """The process groups along ``cp``. They are created on first use, so a model can be parallelized without them.

    Args:
        mesh: the mesh.
        inner: ranks of the inner all-to-all of the two-level kind.
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
        """The run of ``inner_size`` neighbors that this rank is in."""
        return self.mesh.group(f"cp%{self._inner_size}")

    @cached_property
    def outer(self) -> ProcessGroup | None:
        """The ranks at the same position of every run."""
        return self.mesh.group(f"cp/{self._inner_size}")

    @property
    def _inner_size(self) -> int:
        if self.inner_size is None:
            raise LayoutError("the two-level kind needs the size of its inner all-to-all; set ContextOptions.inner.")
        return self.inner_size

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextGroups:
        """Return this object: process groups cannot be copied, so copies of a model share them."""
        # A copy of the layer belongs to the same ranks.
        return self


def take(x: Tensor, rows: Tensor) -> Tensor:
    """Return ``x[rows]``. All ``rows`` must be different: the gradient is a copy, where indexing would accumulate."""
    taken: Tensor = _Take.apply(x, rows)  # type: ignore[no-untyped-call]
    return taken


def put(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return a tensor of ``count`` rows with ``x`` at ``rows``, which must all be different, and 0 elsewhere."""
    whole: Tensor = _Put.apply(x, rows, count)  # type: ignore[no-untyped-call]
    return whole


def _put(x: Tensor, rows: Tensor, count: int) -> Tensor:
    shape = (count, *x.shape[1:])
    # A permutation writes every row, so zeros would be a wasted pass.
    return (x.new_empty(shape) if count == len(rows) else x.new_zeros(shape)).index_copy_(0, rows, x)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.rows, ctx.count = rows, len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _put(grads[0], ctx.rows, ctx.count), None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, count: int) -> Tensor:
        ctx.rows = rows
        return _put(x, rows, count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.rows), None, None
