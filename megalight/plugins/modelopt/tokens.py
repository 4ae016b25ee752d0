"""Scales of tokens where ranks hold parts of the features of each."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.plugins.modelopt.places import Matrix
from megalight.plugins.modelopt.specs import matrix_spec


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
