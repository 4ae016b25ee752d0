"""Clipping and unscaling of gradients that are sharded over ranks."""

from __future__ import annotations

import lightning.pytorch as pl
import torch

from megalight.parallel.data_parallel import DataParallelEngine, clip_coefficient
from megalight.parallel.trace import spanned
from megalight.strategies._lightning import log


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
