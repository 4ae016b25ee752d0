"""Where quantizers sit in this rank's part of a model, and which tensors they round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megalight.plugins.modelopt.presets import SEARCHES

STACKS = ("up", "down")
"""Stacks of matrices of :class:`~megalight.nn.moe.experts.Experts`."""
KEYS_AND_VALUES = ("k_bmm_quantizer", "v_bmm_quantizer")
"""Attributes of attentions."""
ACTIVATIONS = ("input_quantizer", *(f"{stack}_input_quantizer" for stack in STACKS), *KEYS_AND_VALUES)
"""Attributes of modules: quantizers of what passes through them."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A quantized matrix ``[out, in]``: the weight of a linear layer, or that of one expert in a stack.

    The attributes ``weight`` and the two quantizers have ModelOpt's names, so its functions for layers take it.

    Attributes:
        path: where the module that holds it is.
        module: that module.
        parameter: the module's parameter that holds it.
        index: its place in the stack on this rank; None: the parameter is the matrix.
        weight_kind: where its quantizer is in the module (``up_weight_quantizers.3``).
        weight_quantizer: rounds it.
        input_quantizer: rounds what it is multiplied by. All experts of a stack share one.
    """

    path: str
    module: nn.Module
    parameter: str
    index: int | None
    weight_kind: str
    weight_quantizer: Any
    input_quantizer: Any

    @property
    def whole(self) -> nn.Parameter:
        """The parameter that holds it."""
        found: nn.Parameter = getattr(self.module, self.parameter)
        return found

    @property
    def weight(self) -> Tensor:
        """The matrix. A sharded parameter has its values in other memory each time, so this is looked up each time."""
        return self.whole if self.index is None else self.whole[self.index]


@dataclass(frozen=True, eq=False)
class QuantizerPlace:
    """One quantizer.

    Attributes:
        path: its module.
        kind: where it is in the module (``input_quantizer``).
        quantizer: ModelOpt's ``TensorQuantizer``.
        matrix: what it rounds; None: activations.
    """

    path: str
    kind: str
    quantizer: Any
    matrix: Matrix | None = None

    @property
    def name(self) -> str:
        """Its path in the model."""
        return f"{self.path}.{self.kind}"

    @property
    def part(self) -> str:
        """Where it is among the quantizers of a weight that is rounded several times (``.1``); empty: the only one."""
        return "" if self.matrix is None else self.kind.removeprefix(self.matrix.weight_kind)

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and features of a weight that have one ``amax``; 0: all of them.

        A quantizer with an axis has one for each row.
        """
        sizes = self.quantizer.block_sizes or {}
        if self.matrix is None or sizes.get("type") == "dynamic":
            return 0, 0
        if sizes:
            return int(sizes.get(-2, 1)), int(sizes[-1])
        return (1, 0) if self.quantizer.axis is not None else (0, 0)

    @property
    def rounds_blocks(self) -> bool:
        """Whether it rounds now, to blocks of floating-point elements with narrow scales."""
        quantizer = self.quantizer
        return bool(quantizer.is_enabled and quantizer._if_quant and "scale_bits" in (quantizer.block_sizes or {}))

    @property
    def has_amax(self) -> bool:
        """Whether it keeps an ``amax``: not those that compute it for each token or block, or know it."""
        quantizer = self.quantizer
        return bool(
            quantizer.is_enabled
            and not quantizer._dynamic
            and not quantizer.is_mx_format
            and not quantizer._use_constant_amax
        )


@dataclass(frozen=True, eq=False)
class Site:
    """An input, and the matrices that it is multiplied by: one, or those of a stack of experts on this rank.

    Attributes:
        path: the module.
        kind: where the quantizer of the input is in the module.
        quantizer: that quantizer.
        matrices: all of one shape, ``[out, in]``.
        method: how scales of its features are found, and the options of that; None: it has none.
    """

    path: str
    kind: str
    quantizer: Any
    matrices: tuple[Matrix, ...]
    method: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        """The path of its quantizer in the model."""
        return f"{self.path}.{self.kind}"

    @property
    def stacked(self) -> bool:
        """Whether the matrices are those of experts."""
        return self.matrices[0].index is not None


def matrices(root: nn.Module) -> Iterator[Matrix]:
    """Yield the matrices that have quantizers, whether these are enabled or not."""
    for path, module in root.named_modules():
        layer: Any = module
        if hasattr(module, "weight_quantizer"):
            yield Matrix(
                path, module, "weight", None, "weight_quantizer", layer.weight_quantizer, layer.input_quantizer
            )
        for stack in STACKS:
            kind = f"{stack}_weight_quantizers"
            for index, quantizer in enumerate(getattr(module, kind, ())):
                inputs = getattr(layer, f"{stack}_input_quantizer")
                yield Matrix(path, module, stack, index, f"{kind}.{index}", quantizer, inputs)


def places(root: nn.Module) -> Iterator[QuantizerPlace]:
    """Yield all quantizers of activations, then those of weights."""
    for path, module in root.named_modules():
        for kind in ACTIVATIONS:
            if hasattr(module, kind):
                yield QuantizerPlace(path, kind, getattr(module, kind))
    for matrix in matrices(root):
        for part, quantizer in rounds(matrix.weight_quantizer):
            yield QuantizerPlace(matrix.path, f"{matrix.weight_kind}{part}", quantizer, matrix)


def rounds(quantizer: Any) -> list[tuple[str, Any]]:
    """Return the quantizers of a weight that round one after the other, with what follows its name (``.1``)."""
    if isinstance(quantizer, nn.Sequential):
        return [(f".{index}", each) for index, each in enumerate(quantizer)]
    return [("", quantizer)]


def sites(root: nn.Module) -> Iterator[Site]:
    """Yield the inputs of matrices with an enabled quantizer."""
    found: dict[str, list[Matrix]] = {}
    for matrix in matrices(root):
        if matrix.weight_quantizer.is_enabled:
            found.setdefault(f"{matrix.path} {matrix.parameter}", []).append(matrix)
    for held in found.values():
        first = held[0]
        kind = "input_quantizer" if first.index is None else f"{first.parameter}_input_quantizer"
        algorithm: Mapping[str, Any] = getattr(root.get_submodule(first.path), "algorithm", {})
        method = algorithm if algorithm.get("method") in SEARCHES else None
        yield Site(first.path, kind, first.input_quantizer, tuple(held), method)


def amaxes(root: nn.Module) -> Iterator[tuple[QuantizerPlace, Tensor]]:
    """Yield each quantizer that keeps an ``amax``, and this number or these."""
    for place in places(root):
        if place.has_amax:
            yield place, place.quantizer.amax
