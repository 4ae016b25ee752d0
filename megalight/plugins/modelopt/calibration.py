"""Calibration: find the largest magnitude that each quantizer sees, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.plugins.modelopt.quantizer_sites import amaxes, matrix_spec, places, rounds, rows_are_split


def uncalibrated(model: ParallelModel) -> list[str]:
    """Return the quantizers of this rank whose ``amax`` is not known. The host waits for the device."""
    found = list(amaxes(model.root))
    if not found:
        return []
    known = torch.stack([amax.isfinite().all() for _, amax in found]).tolist()
    return [place.name for (place, _), good in zip(found, known, strict=True) if not good]


def needs_calibration(model: ParallelModel) -> bool:
    """Return whether any quantizer of this rank keeps an ``amax``."""
    return next(amaxes(model.root), None) is not None


class Calibration:
    """Collects magnitudes between :meth:`begin` and :meth:`finish`; the forward passes between them round nothing.

    All ranks call both together. Inputs are watched in the forward passes, weights are read at the end, where sharded
    ones must be whole (:meth:`~megalight.parallel.model.ParallelModel.full_parameters`).

    Args:
        model: a model with :class:`~megalight.plugins.modelopt.quantizers.Quantizers`, and with values.
    """

    def __init__(self, model: ParallelModel) -> None:
        self.model = model

    def begin(self) -> None:
        """Watch the inputs from now on."""
        for place in places(self.model.root):
            # Those without an `amax` too: what later layers see must not be rounded.
            place.quantizer.disable_quant()
        for place, _ in amaxes(self.model.root):
            if place.matrix is None:
                place.quantizer.enable_calib()

    def abandon(self) -> None:
        """Forget what was seen since :meth:`begin`, and round again."""
        for place, _ in amaxes(self.model.root):
            if place.matrix is None:
                place.quantizer._calibrator.reset()
                place.quantizer.disable_calib()
        for place in places(self.model.root):
            place.quantizer.enable_quant()

    @torch.no_grad()
    def finish(self) -> list[str]:
        """Agree on each ``amax`` over the ranks, and round from now on.

        Returns:
            the quantizers of this rank that saw no data, or values that are not finite.
        """
        activations = list[Tensor]()
        for place, amax in amaxes(self.model.root):
            if place.matrix is None:
                _take(place.quantizer, amax)
                activations.append(amax)
        # Tensor-parallel ranks see other features (row), heads or tokens (column), the others see other tokens.
        # These are all ranks of a stage, also those with other experts: a stack has one quantizer of inputs.
        agree(activations, self.model.mesh, ("tp", "cp", "dp"), dist.ReduceOp.MAX)
        self.read_weights()
        for place in places(self.model.root):
            place.quantizer.enable_quant()
        return [
            place.name for place, amax in amaxes(self.model.root) if not bool((amax.isfinite() & (amax >= 0)).all())
        ]

    @torch.no_grad()
    def read_weights(self) -> None:
        """Set the ``amax`` of weights by what they are now."""
        dense, experts = list[Tensor](), list[Tensor]()
        for place, amax in amaxes(self.model.root):
            if place.matrix is None:
                continue
            scale = getattr(rounds(place.matrix.weight_quantizer)[0][1], "_pre_quant_scale", None)
            # The first of several quantizers multiplies by itself.
            times = 1 if scale is None or place.part in ("", ".0") else scale
            read(place.quantizer, place.matrix.weight * times)
            height, width = place.blocks
            # Blocks of a row lie on one rank each.
            if not width and not (height and rows_are_split(matrix_spec(self.model, place.matrix))):
                (dense if place.matrix.index is None else experts).append(amax)
        # Replicas hold the same weights.
        agree(dense, self.model.mesh, ("tp",), dist.ReduceOp.MAX)
        agree(experts, self.model.mesh, ("etp",), dist.ReduceOp.MAX)


def read(quantizer: Any, weight: Tensor) -> None:
    """Set the ``amax`` of one quantizer by this rank's part of a weight."""
    rounds = quantizer._if_quant
    quantizer.disable_quant()
    quantizer.enable_calib()
    quantizer(weight.detach())
    _take(quantizer, quantizer.amax)
    if rounds:
        quantizer.enable_quant()


def _take(quantizer: Any, amax: Tensor) -> None:
    """Move what a quantizer has seen to its ``amax``; -1: nothing."""
    seen = quantizer._calibrator.compute_amax()
    amax.copy_(torch.full_like(amax, -1) if seen is None else seen.to(amax).view_as(amax))
    quantizer._calibrator.reset()
    quantizer.disable_calib()


def agree(found: Sequence[Tensor], mesh: ParallelMesh, axes: Sequence[str], operation: Any) -> None:
    """Reduce each tensor over the ranks of these axes in place, in one message per axis."""
    axes = [axis for axis in axes if mesh.size(axis) > 1]
    if not found or not axes:
        return
    flat = torch.cat([tensor.flatten() for tensor in found])
    for axis in axes:
        dist.all_reduce(flat, operation, mesh.group(axis))
    for tensor, part in zip(found, torch.split(flat, [tensor.numel() for tensor in found]), strict=True):
        tensor.copy_(part.view_as(tensor))
