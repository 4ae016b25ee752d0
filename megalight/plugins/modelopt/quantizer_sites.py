"""Where quantizers sit in this rank's part of a model, which tensors they round, and which scales the rank holds.

Scales have names that are the same in every layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.shard import ShardPiece, ShardSpec
from megalight.plugins.modelopt.presets import SEARCHES

STACKS = ("up", "down")
"""Stacks of matrices of :class:`~megalight.nn.moe.layer.Experts`."""
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


def rows_are_split(spec: ShardSpec) -> bool:
    """Return whether ranks hold different rows of this weight."""
    return any(piece.size[0] != piece.shape[0] for piece in spec.pieces)


def matrix_spec(model: ParallelModel, matrix: Matrix) -> ShardSpec:
    """Return what this rank holds of a matrix."""
    spec = model.specs[f"{matrix.path}.{matrix.parameter}"]
    if matrix.index is None:
        return spec
    start = matrix.index * matrix.weight.numel()
    pieces = (piece for piece in spec.pieces if start <= piece.start < start + matrix.weight.numel())
    own = tuple(replace(piece, start=piece.start - start) for piece in pieces)
    return ShardSpec(own, tuple(matrix.weight.shape), spec.data)


def amax_spec(model: ParallelModel, place: QuantizerPlace) -> ShardSpec:
    """Return what this rank holds of a quantizer's ``amax``; its shape is that of the buffer.

    Raises:
        ConfigurationError: blocks do not divide this rank's rows or features.
    """
    first = model.mesh.rank("tp") == 0
    matrix = place.matrix
    if matrix is None:
        return ShardSpec.replicated(f"{model.prefix}{place.name}.amax", (), owner=first)
    spec = matrix_spec(model, matrix)
    height, width = place.blocks
    if matrix.index is not None:
        first = model.mesh.rank("etp") == 0
    if height == 0:
        name = f"{model.prefix}{place.name}.amax"
        if matrix.index is not None:
            # of the whole model: `index` counts the experts of this rank
            around = f"{model.prefix}{matrix.path}."
            expert = spec.pieces[0].name.removeprefix(around).partition(".")[0]
            name = f"{around}{expert}.{matrix.parameter}_weight_quantizer{place.part}.amax"
        return replace(ShardSpec.replicated(name, (), owner=first), data=spec.data)
    features = spec.shape[1]
    _check_division(spec, height, width)
    block = (height, width or features)

    def numbers(piece: ShardPiece) -> ShardPiece:
        # Ranks with other columns of the same rows have the same `amax` if it is of whole rows: only one may own it.
        mine = width > 0 or piece.size[1] == piece.shape[1]
        columns = width or piece.shape[1]
        return replace(
            piece,
            name=f"{piece.name}_quantizer{place.part}.amax",
            shape=(piece.shape[0] // height, piece.shape[1] // columns),
            offset=(piece.offset[0] // height, piece.offset[1] // columns),
            size=(piece.size[0] // height, max(piece.size[1] // columns, 1)),
            start=piece.start // prod(block),
            partial=(),
            owner=piece.owner if mine else first,
        )

    rows, columns = spec.shape[0] // block[0], spec.shape[1] // block[1]
    shape = (rows, 1, columns, 1) if height > 1 else (rows * columns, 1)
    return ShardSpec(tuple(map(numbers, spec.pieces)), shape, spec.data)


def _check_division(spec: ShardSpec, height: int, width: int) -> None:
    for piece in spec.pieces:
        if piece.size[0] % height or (width and piece.size[1] % width):
            raise ConfigurationError(
                f"{piece.name} has {piece.size[0]} rows of {piece.size[1]} features on this rank, and blocks of "
                f"{f'{height} x ' if height > 1 else ''}{width} features do not divide them. Use a preset without "
                "blocks, or a layout that does not split this weight."
            )


def check_blocks(model: ParallelModel, matrix: Matrix) -> None:
    """Raise if blocks whose scales are found in each pass do not divide the features of this rank.

    Raises:
        ConfigurationError: a block would end within the features of another rank.
    """
    for _, quantizer in rounds(matrix.weight_quantizer):
        sizes = (quantizer.block_sizes or {}) if quantizer.is_enabled else {}
        if "scale_bits" in sizes:
            _check_division(matrix_spec(model, matrix), 1, int(sizes[-1]))


def features_spec(model: ParallelModel, site: Site) -> ShardSpec:
    """Return what a rank holds of one number for each feature of an input."""
    weight = matrix_spec(model, site.matrices[0])
    piece = weight.pieces[0]
    (_, whole), (_, offset), (_, size) = piece.shape, piece.offset, piece.size
    # Ranks with other rows of the same columns, and those with other experts, have the same numbers.
    same: tuple[str, ...] = ("ep", "etp") if site.stacked else ("tp",)
    if size < whole:
        same = same[:-1]
    owner = all(model.mesh.rank(axis) == 0 for axis in same)
    name = f"{model.prefix}{site.name}.pre_quant_scale"
    return ShardSpec((ShardPiece(name, (whole,), (offset,), (size,), owner=owner),), (size,), weight.data)


def row_weights(spec: ShardSpec) -> list[float] | None:
    """Return for each row of a split weight on this rank: 1, or 0 if another rank counts it. None: all ranks hold all.

    Several ranks hold the same keys and values where there are fewer heads than ranks.
    """
    if not rows_are_split(spec):
        return None
    found = [0.0] * spec.shape[0]
    for piece in spec.pieces:
        start = piece.start // spec.shape[1]
        found[start : start + piece.size[0]] = [float(piece.owner)] * piece.size[0]
    return found


# Scales per token, where ranks hold parts of its features


def share_tokens(model: ParallelModel, matrix: Matrix) -> None:
    """Let ranks with parts of the features of a token use one scale for it, found in each forward pass.

    Nothing happens if the layer's inputs have no such scales, or each rank has all features.
    """
    quantizer = matrix.input_quantizer
    split = any(piece.size[1] != piece.shape[1] for piece in matrix_spec(model, matrix).pieces)
    # All experts of a stack share the quantizer of their inputs.
    if split and quantizer.is_enabled and quantizer._dynamic and "_get_amax" not in vars(quantizer):
        axis = "tp" if matrix.index is None else "etp"
        quantizer._get_amax = partial(_largest, quantizer._get_amax, model.mesh, axis)


def _largest(own: Any, mesh: ParallelMesh, axis: str, inputs: Tensor) -> Tensor:
    """Return the largest magnitude of each token over the ranks along an axis."""
    with torch.no_grad():
        amax: Tensor = own(inputs).contiguous()
        dist.all_reduce(amax, dist.ReduceOp.MAX, mesh.group(axis))
    return amax
