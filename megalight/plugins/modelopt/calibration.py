"""Calibration: find the largest magnitude that each quantizer sees, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.plugins.modelopt.places import amaxes, places
from megalight.plugins.modelopt.specs import matrix_spec, rows_are_split


def uncalibrated(model: ParallelModel) -> list[str]:
    """Return the quantizers of this rank whose ``amax`` is not known. The host waits for the device."""
    found = list(amaxes(model.root))
    if not found:
        return []
    known = torch.stack([amax.isfinite().all() for _, amax in found]).tolist()
    return [place.name for (place, _), good in zip(found, known, strict=True) if not good]


class Calibration:
    """Collects magnitudes between :meth:`begin` and :meth:`finish`; the forward passes between them round nothing.

    All ranks call both together. Weights are read at the beginning, inputs in the forward passes.

    Args:
        model: a model with :class:`~megalight.plugins.modelopt.quantizers.Quantizers`, and with values.

    Raises:
        ConfigurationError: the model has no quantizers, or its parameters are sharded.
    """

    def __init__(self, model: ParallelModel) -> None:
        if model.shards is not None:
            raise ConfigurationError(
                "calibration reads whole weights, and data_parallel.level='optim_grads_params' shards them. Use level "
                "'optim_grads' for it; the checkpoint loads under any level."
            )
        self.model = model

    def begin(self) -> None:
        """Read the weights, and watch the inputs from now on."""
        for place in places(self.model.root):
            # Those without an `amax` too: what later layers see must not be rounded.
            place.quantizer.disable_quant()
        for place, _ in amaxes(self.model.root):
            place.quantizer.enable_calib()
            if place.matrix is not None:
                place.quantizer(place.matrix.weight.detach())

    @torch.no_grad()
    def finish(self) -> list[str]:
        """Agree on each ``amax`` over the ranks, and round from now on.

        Returns:
            the quantizers of this rank that saw no data, or values that are not finite.
        """
        activations, whole_weights, whole_experts = list[Tensor](), list[Tensor](), list[Tensor]()
        for place, amax in amaxes(self.model.root):
            quantizer = place.quantizer
            seen = quantizer._calibrator.compute_amax()
            amax.copy_(torch.full_like(amax, -1) if seen is None else seen.to(amax).view_as(amax))
            quantizer._calibrator.reset()
            # Weight forwards of the passes were watched too, and gave the same number again.
            quantizer.disable_calib()
            height, width = place.blocks
            if place.matrix is None:
                activations.append(amax)
            # Blocks of a row lie on one rank each.
            elif not width and not (height and rows_are_split(matrix_spec(self.model, place.matrix))):
                (whole_weights if place.matrix.index is None else whole_experts).append(amax)
        for place in places(self.model.root):
            place.quantizer.enable_quant()
        mesh = self.model.mesh
        # Tensor-parallel ranks see other features (row), heads or tokens (column), the others see other tokens.
        # These are all ranks of a stage, also those with other experts: a stack has one quantizer of inputs.
        _largest(activations, mesh, ("tp", "cp", "dp"))
        # Replicas hold the same weights.
        _largest(whole_weights, mesh, ("tp",))
        _largest(whole_experts, mesh, ("etp",))
        return [
            place.name for place, amax in amaxes(self.model.root) if not bool((amax.isfinite() & (amax >= 0)).all())
        ]


def _largest(found: Sequence[Tensor], mesh: ParallelMesh, axes: Sequence[str]) -> None:
    """Take the maximum of each tensor over the ranks of these axes, in one message per axis."""
    if not found:
        return
    flat = torch.cat([amax.flatten() for amax in found])
    for axis in axes:
        if mesh.size(axis) > 1:
            dist.all_reduce(flat, dist.ReduceOp.MAX, mesh.group(axis))
    for amax, part in zip(found, torch.split(flat, [amax.numel() for amax in found]), strict=True):
        amax.copy_(part.view_as(amax))
