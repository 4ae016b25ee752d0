"""Styles of linear layers: column and row parallel, with their adapters; GPT-2's ``Conv1D``; grouped norms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megalight.errors import LayoutError
from megalight.nn import Linear
from megalight.nn.adapter import Adapter, AdapterSet
from megalight.nn.mamba2 import GatedNorm
from megalight.parallel import shard
from megalight.parallel.degrees import replicas_of
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shared_state import GroupMean, ParallelDropout, SharedState, Tokens
from megalight.parallel.styles.style import Rule, Splitter, Style, register
from megalight.parallel.tensor.linear import ColumnAdapter, ColumnLinear, RowAdapter, RowLinear, column_linear, row_sum


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
    output = functools.partial(shard.output_features, units=counts, shared=True)  # the layer's own split decides
    down = splitter.split(path, adapter, "A", functools.partial(shard.replicated, partial=partial))
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
    down = splitter.split(path, adapter, "A", functools.partial(shard.along, dim=1))
    partial = functools.partial(shard.replicated, partial=True)
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


@register
@dataclass(frozen=True)
class Column(Style):
    """A linear layer whose *output* features are split over ``tp``.

    Attributes:
        units: number of indivisible parts of the output (attention heads). None: the layer's own sections decide, or
            every feature is a unit.
        shared: whether there may be fewer units than ``tp``, so that a group of ``tp / units`` ranks holds each
            (key-value heads). In a fused layer, sections with fewer units than the largest may always be shared.
        gather_output: return the whole output on every rank, so that other modules do not notice the split.
        tokens: the tokens that the layer receives.
        sizes: output features of each section, of a foreign layer that cannot state its sections.
        counts: units of each of these sections (heads); empty: every feature is one.
    """

    units: int | None = None
    shared: bool = False
    gather_output: bool = False
    tokens: Tokens = "share"
    sizes: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def overlaps(self) -> bool:
        """True if the layer gathers tokens from shares."""
        return self.tokens == "share"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module:
        """Return a :class:`ColumnLinear`; a fused layer is split section by section, an adapter with its layer."""
        linear = self.expect(name, module, nn.Linear, Linear, replaced=self.splits(splitter.shared.mesh))
        if self.sizes:
            rule: Rule = functools.partial(shard.sections, sizes=self.sizes, units=self.counts)
        else:
            units = self._units(name, linear, splitter.shared.mesh)
            rule = functools.partial(shard.output_features, units=units, shared=self.shared)
        weight, bias = (splitter.split(name, linear, local, rule) for local in ("weight", "bias"))
        assert weight is not None
        # Read after the split: of a shared section, a rank holds more rows than its size divided by tp.
        sizes = splitter.sizes(linear.weight)
        layer = ColumnLinear(
            weight,
            bias,
            sizes,
            splitter.shared,
            tokens=self.tokens,
            gather_output=self.gather_output,
            name=name,
        )
        layer.adapter = column_adapters(splitter, name, linear, self.units, sizes, self.tokens)
        return layer

    def _units(self, name: str, linear: nn.Linear | Linear, mesh: ParallelMesh) -> list[int]:
        """Return the number of indivisible parts of each section."""
        rows, sections = linear.weight.shape[0], getattr(linear, "sections", None)
        if self.units is not None and sections:
            raise LayoutError(f"{name} has sections that state their units; leave units={self.units} out of its rule.")
        units = [section.units for section in sections] if sections else [self.units or rows]
        sizes = [section.size for section in sections] if sections else [rows]
        for size, count in zip(sizes, units, strict=True):
            if size % count:
                raise LayoutError(f"{name}: {size} output features cannot consist of {count} equal units.")
        # The outputs of all ranks are laid side by side. A shared unit would occur there several times.
        if self.gather_output and any(count % mesh.tp for count in units):
            raise LayoutError(f"{name}: gather_output needs units ({units}) that tp={mesh.tp} divides; lower tp.")
        return units


@register
@dataclass(frozen=True)
class Row(Style):
    """A linear layer whose *input* features are split over ``tp``; outputs are summed, the bias is added once.

    Attributes:
        scatter_output: under sequence parallelism, each rank gets the sum for its share of the tokens. Switch it off
            inside of a module that computes with all tokens.
    """

    scatter_output: bool = True

    @property
    def overlaps(self) -> bool:
        """True: the layer sums its outputs over ranks."""
        return True

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module:
        """Return a :class:`RowLinear`; an adapter is split with its layer."""
        linear = self.expect(name, module, nn.Linear, Linear, replaced=self.splits(splitter.shared.mesh))
        # Each rank adds the bias to its own tokens, so its gradient is one term of a sum. Otherwise all ranks have all
        # of it.
        partial = splitter.shared.sequence_parallel and self.scatter_output
        # Sections divide output features, and each rank has terms of all of these.
        if getattr(linear, "sections", None):
            raise LayoutError(f"{name} has sections of output features, but its rule Row splits the input; use Column.")
        weight = splitter.split(name, linear, "weight", functools.partial(shard.along, dim=1))
        bias = splitter.split(name, linear, "bias", functools.partial(shard.replicated, partial=partial))
        assert weight is not None
        layer = RowLinear(weight, bias, splitter.shared, name, scatter_output=self.scatter_output)
        layer.adapter = row_adapters(splitter, name, linear)
        return layer


@register
@dataclass(frozen=True)
class Channels(Style):
    """A module whose parameters have one row per channel (a depthwise convolution); each rank holds its channels' rows.

    If the module states ``sections``, each is divided on its own, in whole units. With ``group_size``, groups stay
    whole. Use it after a layer with the style :class:`~.column.Column`, which provides all tokens of these channels.
    """

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, with fewer rows.

        Raises:
            LayoutError: ``tp`` does not divide the channels, or the module does not state its initial values.
        """
        stated = getattr(module, "initializers", {})
        sections, group = getattr(module, "sections", None), getattr(module, "group_size", 1)
        for local, parameter in module._parameters.items():
            if parameter is not None and local not in stated:
                raise LayoutError(
                    f"{name} ({type(module).__name__}) does not state how {local} is drawn, so a rank cannot draw its "
                    "rows alone; give the module an attribute `initializers`, as megalight.nn.CausalConv has it."
                )
            rows = 0 if parameter is None else parameter.shape[0]
            units = [section.units for section in sections] if sections else [rows // group]
            rule = functools.partial(shard.output_features, units=units)
            module._parameters[local] = splitter.split(name, module, local, rule)


@register
@dataclass(frozen=True)
class NormGroups(Style):
    """A norm over groups of features (``nn.mamba2.GatedNorm``): each rank holds whole groups, or an equal part of one.

    In the second case, mean squares are averaged over the ranks that hold a group, in both passes: one number per token
    and group. Use it after a layer with the style :class:`~.column.Column`, which provides all tokens of the features.
    """

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, with a part of its features.

        Raises:
            LayoutError: ``tp`` neither divides the groups, nor is a multiple of them that divides the features.
        """
        norm = self.expect(name, module, GatedNorm)
        features, mesh = norm.weight.shape[0], splitter.shared.mesh
        ranks = replicas_of(features // norm.group_size, mesh.tp, f"{name}.weight")
        # Single features are units: a rank may hold a part of a group.
        rule = functools.partial(shard.output_features, units=[features])
        norm._parameters["weight"] = splitter.split(name, norm, "weight", rule)
        if ranks > 1:
            norm.group_size //= ranks
            norm.average = GroupMean(splitter.shared, ranks)


CONV1D = "transformers.pytorch_utils.Conv1D"


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is a ``Conv1D``, not of a subclass, which may compute something else."""
    return f"{type(module).__module__}.{type(module).__qualname__}" == CONV1D


def _check(style: Style, name: str, module: nn.Module) -> None:
    if not is_transposed(module):
        raise LayoutError(
            f"the plan's rule {type(style).__name__} meets {name}, a {type(module).__name__}; it serves {CONV1D}. Make "
            "the rule's pattern narrower."
        )


class TransposedColumn(nn.Module):
    """``y = x W + b`` for this rank's columns of ``W``.

    Args:
        weight: ``[sections * in, out / sections / tp]``: one section below the other.
        bias: ``[out / tp]``.
        sections: number of sections of the output.
        shared: the state that all tensor-parallel layers share.
        tokens: the tokens that the layer receives under sequence parallelism.
        name: name of the module, for options and messages.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        sections: int,
        shared: SharedState,
        tokens: Tokens,
        name: str,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.sections = sections
        self.shared = shared
        self.tokens = tokens
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """``[T/tp, in] -> [T, out/tp]`` under sequence parallelism, else ``[T, in] -> [T, out/tp]``."""
        weight = self.weight.t()
        if self.sections > 1:
            weight = self.weight.view(self.sections, -1, self.weight.shape[1]).transpose(1, 2).flatten(0, 1)
        return column_linear(x, weight, self.bias, self.shared, self.tokens, self.name)


class TransposedRow(nn.Module):
    """``y = x W + b`` for this rank's rows of ``W``: partial results are summed, then the bias is added once.

    Args:
        weight: ``[in / tp, out]``.
        bias: ``[out]``.
        shared: the state that all tensor-parallel layers share.
        scatter_output: under sequence parallelism, return this rank's share of the tokens.
        name: name of the module, for options and messages.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, shared: SharedState, scatter_output: bool, name: str
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.shared = shared
        self.scatter_output = scatter_output
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """``[T, in/tp] -> [T/tp, out]`` under sequence parallelism with ``scatter_output``, else ``-> [T, out]``."""
        y = row_sum(x, self.weight.t(), self.shared, self.scatter_output, self.name)
        return y if self.bias is None else y + self.bias.to(y.dtype)


@register
@dataclass(frozen=True)
class ConvColumn(Style):
    """A ``Conv1D`` whose *output* features are split over ``tp``, in equal sections of whole heads.

    Attributes:
        sections: number of sections (3: queries, keys and values).
        units: indivisible units of each section (heads); None: every feature is one.
        tokens: the tokens that the layer receives.
    """

    sections: int = 1
    units: int | None = None
    tokens: Tokens = "share"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module | None:
        """Return a :class:`TransposedColumn`."""
        _check(self, name, module)
        if not self.splits(splitter.shared.mesh):
            splitter.keep(name, module)
            return None
        out = module.get_parameter("weight").shape[1]
        sizes, units = (out // self.sections,) * self.sections, (self.units,) * self.sections if self.units else ()
        weight, bias = (
            splitter.split(name, module, local, functools.partial(shard.sections, sizes=sizes, units=units, dim=dim))
            for local, dim in {"weight": 1, "bias": 0}.items()
        )
        assert weight is not None
        return TransposedColumn(weight, bias, self.sections, splitter.shared, self.tokens, name)


@register
@dataclass(frozen=True)
class ConvRow(Style):
    """A ``Conv1D`` whose *input* features are split over ``tp``; outputs are summed, the bias is added once.

    Attributes:
        scatter_output: under sequence parallelism, each rank gets the sum for its share of the tokens.
    """

    scatter_output: bool = True

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module | None:
        """Return a :class:`TransposedRow`."""
        _check(self, name, module)
        if not self.splits(splitter.shared.mesh):
            splitter.keep(name, module)
            return None
        partial = splitter.shared.sequence_parallel and self.scatter_output
        weight = splitter.split(name, module, "weight", functools.partial(shard.along, dim=0))
        bias = splitter.split(name, module, "bias", functools.partial(shard.replicated, partial=partial))
        assert weight is not None
        return TransposedRow(weight, bias, splitter.shared, self.scatter_output, name)
