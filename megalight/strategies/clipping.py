"""Clipping and unscaling of gradients that are sharded over ranks."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from megalight.optim.sharded import sharding_of
from megalight.parallel.data_parallel import DataParallelEngine, clip_coefficient
from megalight.parallel.data_parallel.grad_norm import permit_clipping, refuse_clipping
from megalight.parallel.model import ParallelModel
from megalight.parallel.trace import spanned
from megalight.strategies._lightning import log

IN_PART = (
    "cannot clip under MegatronStrategy, which divides gradients over ranks here: each would clip its part by its own "
    "norm. Use Trainer(gradient_clip_val=...) or, in the hook configure_gradient_clipping, "
    "self.clip_gradients(optimizer, gradient_clip_val=...): both clip by the norm over all ranks."
)
"""Why torch's functions that clip are refused where a rank has a part of the gradients."""


def guard_clipping(model: ParallelModel, optimizer: Optimizer) -> None:
    """Refuse torch's functions that clip, while ``fit`` runs, unless each rank has all gradients of the whole model."""
    sharding, mesh = sharding_of(optimizer), model.mesh
    if mesh.tp * mesh.pp * mesh.ep * mesh.etp > 1 or (sharding is not None and sharding.divided):
        refuse_clipping(model.parameters(), IN_PART)


def unguard_clipping(model: ParallelModel) -> None:
    """Permit them again after ``fit``, for a loop of the user's own."""
    permit_clipping(model.parameters(), IN_PART)


@spanned("clip")
def clip_by_norm(module: pl.LightningModule, engine: DataParallelEngine, max_norm: float) -> None:
    """Scale gradients to a global norm of at most ``max_norm``, and log the norm before clipping as ``grad_norm``."""
    if not engine.main_gradients.reduced:  # the batch was skipped
        return
    # The norm stays on the device: the host does not wait, neither here nor for the log.
    norm = engine.grad_norm()
    engine.scale_gradients(clip_coefficient(norm, max_norm))
    log(module, "grad_norm", norm)


@spanned("clip")
def clip_by_value(engine: DataParallelEngine, limit: float) -> None:
    """Clamp each element to ``[-limit, limit]``."""
    for bucket in engine.buckets:
        if bucket.reduced is not None:  # the batch was not skipped
            bucket.reduced.clamp_(-limit, limit)


def unscale(engine: DataParallelEngine, scale: float) -> bool:
    """Divide gradients by the loss scale. Return whether all of them are finite, on every rank. The host waits."""
    # The norm is over all ranks, so they agree: one that skipped the update alone would have other weights.
    finite = bool(torch.isfinite(engine.grad_norm()))
    if engine.gradients:
        torch._foreach_mul_(engine.gradients, 1 / scale)
    return finite
