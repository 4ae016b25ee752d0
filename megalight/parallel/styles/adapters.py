"""Split adapters together with their linear layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from megalight.errors import LayoutError
from megalight.nn.adapter import Adapter, AdapterSet
from megalight.nn.canonical import Part
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from megalight.parallel.splitter import Splitter
from megalight.parallel.tensor import split
from megalight.parallel.tensor.adapter import ColumnAdapter, RowAdapter
from megalight.parallel.tensor.dropout import ParallelDropout
from megalight.parallel.tensor.shared import Tokens


def column_adapters(
    splitter: Splitter, name: str, layer: nn.Module, units: int | None, sizes: Sequence[int], tokens: Tokens
) -> AdapterSet | None:
    """Split the adapters of a layer with split output features: ``A`` stays whole, ``B`` is split like the weight.

    The gradient of ``A`` is partial if each rank computes it only from its share of the tokens or of the output
    features.

    Args:
        units: number of indivisible units of a layer without sections; None: every feature is one.
        sizes: this rank's output features of each section.
        tokens: the tokens that the layer receives.
    """
    return _each(splitter, name, layer, lambda path, adapter: _column(splitter, path, adapter, units, sizes, tokens))


def row_adapters(splitter: Splitter, name: str, layer: nn.Module) -> AdapterSet | None:
    """Split the adapters of a layer with split input features: ``A`` is split like the weight, ``B`` stays whole.

    The gradients of ``B`` and of magnitudes are partial, because each rank computes them from its term of ``x A^T``.

    Raises:
        LayoutError: the layer's collective runs in pieces with its product, so it cannot include the adapter's term.
    """
    if not isinstance(getattr(layer, "adapter", None), AdapterSet):
        return None
    shared = splitter.shared
    kind = shared.tensor.kind_of(name)
    # `auto` needs no error: a row layer with an adapter takes the plain collective by itself.
    if kind not in ("auto", "plain") and shared.mesh.tp > 1:
        raise LayoutError(
            f"{name} has an adapter, whose term is added before the layer's collective; with overlap={kind!r} that "
            "collective is part of the product. Choose overlap='plain' for this layer, or leave it out of the targets."
        )
    return _each(splitter, name, layer, lambda path, adapter: _row(splitter, path, adapter))


def _each(
    splitter: Splitter, name: str, layer: nn.Module, divide: Callable[[str, Adapter], Adapter]
) -> AdapterSet | None:
    """Split each adapter of a layer, and mark them as visited."""
    adapters = getattr(layer, "adapter", None)
    if not isinstance(adapters, AdapterSet):
        return None
    # They are split with the layer; a rule whose pattern matches the adapter's name must not split them again.
    splitter.done.update(id(module) for module in adapters.modules())
    found = AdapterSet()
    found.active = adapters.active
    for key, adapter in adapters.items():
        assert isinstance(adapter, Adapter)
        part = found[key] = divide(f"{name}.adapter.{key}", adapter)
        splitter.dress(part, adapter)
    return found


def _column(
    splitter: Splitter, path: str, adapter: Adapter, units: int | None, sizes: Sequence[int], tokens: Tokens
) -> Adapter:
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

    down = splitter.split(path, adapter, "A", whole)
    up = splitter.split(path, adapter, "B", output)
    magnitude = splitter.split(path, adapter, "magnitude", output)
    assert down is not None and up is not None
    dropout = adapter.dropout
    if isinstance(dropout, nn.Dropout) and tokens == "share":
        # Shares differ from rank to rank, so masks must too. Whole tokens need the same mask everywhere.
        dropout = ParallelDropout(dropout.p, shared)
    found = ColumnAdapter(adapter, down, up, sizes, shared, tokens, dropout)
    found.magnitude = magnitude
    return found


def _row(splitter: Splitter, path: str, adapter: Adapter) -> Adapter:
    shared = splitter.shared
    down = splitter.split(path, adapter, "A", lambda parts, shape, mesh: split.along(parts[0], 1, mesh))

    def partial(parts: Sequence[Part], shape: tuple[int, ...], mesh: ParallelMesh) -> ShardSpec:
        return split.replicated(parts, shape, mesh, partial=True)

    up = splitter.split(path, adapter, "B", partial)
    magnitude = splitter.split(path, adapter, "magnitude", partial)
    assert down is not None and up is not None
    dropout = adapter.dropout
    if isinstance(dropout, nn.Dropout):
        # The input features are split, so ranks hold different elements and need different masks.
        dropout = ParallelDropout(dropout.p, shared, split=True)
    found = RowAdapter(adapter, down, up, shared, dropout)
    found.magnitude = magnitude
    return found
