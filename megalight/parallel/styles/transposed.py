"""Linear layers that keep their weight as ``[in, out]`` (GPT-2's ``Conv1D``): column and row parallel."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor, nn

from megalight.errors import LayoutError
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register
from megalight.parallel.tensor import split
from megalight.parallel.tensor.linear import column_linear, row_sum
from megalight.parallel.tensor.shared import Shared, Tokens

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
        self, weight: nn.Parameter, bias: nn.Parameter | None, sections: int, shared: Shared, tokens: Tokens, name: str
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
        self, weight: nn.Parameter, bias: nn.Parameter | None, shared: Shared, scatter_output: bool, name: str
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
            splitter.split(name, module, local, functools.partial(split.sections, sizes=sizes, units=units, dim=dim))
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
        weight = splitter.split(name, module, "weight", functools.partial(split.along, dim=0))
        bias = splitter.split(name, module, "bias", functools.partial(split.replicated, partial=partial))
        assert weight is not None
        return TransposedRow(weight, bias, splitter.shared, self.scatter_output, name)
