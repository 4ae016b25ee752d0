"""Split adapters together with their linear layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from megalight.errors import LayoutError
from megalight.nn.adapter import Adapter
from megalight.nn.canonical import Part
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from megalight.parallel.splitter import Splitter
from megalight.parallel.tensor import split
from megalight.parallel.tensor.adapter import ColumnAdapter, RowAdapter
from megalight.parallel.tensor.dropout import ParallelDropout
from megalight.parallel.tensor.shared import Tokens


def column_adapter(
    splitter: Splitter, name: str, layer: nn.Module, units: int | None, sizes: Sequence[int], tokens: Tokens
) -> Adapter | None:
    """Split the adapter of a layer with split output features: ``A`` stays whole, ``B`` is split like the weight.

    The gradient of ``A`` is partial if each rank computes it only from its share of the tokens or of the output
    features.

    Args:
        units: number of indivisible units of a layer without sections; None: every feature is one.
        sizes: this rank's output features of each section.
        tokens: the tokens that the layer receives.
    """
    adapter = _take(splitter, layer)
    if adapter is None:
        return None
    shared = splitter.shared
    # With whole tokens, the backward sums the gradient of the narrow features over ranks before it reaches A;
    # with a share of the tokens, each rank's A gets one term.
    partial = shared.sequence_parallel and tokens != "whole"
    # B has the layer's output features, so it must be cut into the same units (heads).
    counts = list(adapter.units.values()) if len(adapter.adapted) > 1 or units is None else [units]

    def whole(parts: Sequence[Part], shape: tuple[int, ...], mesh: ParallelMesh) -> ShardSpec:
        return split.replicated(parts, shape, mesh, partial=partial)

    def output(parts: Sequence[Part], shape: tuple[int, ...], mesh: ParallelMesh) -> ShardSpec:
        return split.output_features(parts, counts, mesh, shared=True)  # the layer's own split decides

    down = splitter.split(f"{name}.adapter", adapter, "A", whole)
    up = splitter.split(f"{name}.adapter", adapter, "B", output)
    magnitude = splitter.split(f"{name}.adapter", adapter, "magnitude", output)
    assert down is not None and up is not None
    dropout = adapter.dropout
    if isinstance(dropout, nn.Dropout) and tokens == "share":
        # Shares differ from rank to rank, so masks must too. Whole tokens need the same mask everywhere.
        dropout = ParallelDropout(dropout.p, shared)
    found = ColumnAdapter(adapter, down, up, sizes, shared, tokens, dropout)
    found.magnitude = magnitude
    splitter.dress(found, adapter)
    return found


def row_adapter(splitter: Splitter, name: str, layer: nn.Module) -> Adapter | None:
    """Split the adapter of a layer with split input features: ``A`` is split like the weight, ``B`` stays whole.

    The gradients of ``B`` and of magnitudes are partial, because each rank computes them from its term of ``x A^T``.

    Raises:
        LayoutError: the layer's collective runs in pieces with its product, so it cannot include the adapter's term.
    """
    adapter = _take(splitter, layer)
    if adapter is None:
        return None
    shared = splitter.shared
    kind = shared.tensor.kind_of(name)
    # `auto` needs no error: a row layer with an adapter takes the plain collective by itself.
    if kind not in ("auto", "plain") and shared.mesh.tp > 1:
        raise LayoutError(
            f"{name} has an adapter, whose term is added before the layer's collective; with overlap={kind!r} that "
            "collective is part of the product. Choose overlap='plain' for this layer, or leave it out of the targets."
        )
    down = splitter.split(f"{name}.adapter", adapter, "A", lambda parts, shape, mesh: split.along(parts[0], 1, mesh))

    def partial(parts: Sequence[Part], shape: tuple[int, ...], mesh: ParallelMesh) -> ShardSpec:
        return split.replicated(parts, shape, mesh, partial=True)

    up = splitter.split(f"{name}.adapter", adapter, "B", partial)
    magnitude = splitter.split(f"{name}.adapter", adapter, "magnitude", partial)
    assert down is not None and up is not None
    dropout = adapter.dropout
    if isinstance(dropout, nn.Dropout):
        # The input features are split, so ranks hold different elements and need different masks.
        dropout = ParallelDropout(dropout.p, shared, split=True)
    found = RowAdapter(adapter, down, up, shared, dropout)
    found.magnitude = magnitude
    splitter.dress(found, adapter)
    return found


def _take(splitter: Splitter, layer: nn.Module) -> Adapter | None:
    """Return the adapter of a layer, and mark it as visited."""
    adapter = getattr(layer, "adapter", None)
    if not isinstance(adapter, Adapter):
        return None
    # They are split with the layer; a rule whose pattern matches the adapter's name must not split them again.
    splitter.done.update(id(module) for module in adapter.modules())
    return adapter
