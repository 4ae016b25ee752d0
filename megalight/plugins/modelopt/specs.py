"""What a rank holds of a quantizer's scales, under names that are the same in every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.shard import ShardPiece, ShardSpec
from megalight.plugins.modelopt.quantizer_sites import Matrix, QuantizerPlace, Site, rounds


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
