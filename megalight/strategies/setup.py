"""From the user's module to this rank's part of a parallel model, and to its data-parallel engine.

The order is that of docs/parallelism-order.md; :mod:`megalight.parallel.model` carries it out.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import RandomSampler

from megalight.models.module import MegalightModule
from megalight.optim import shard_optimizer
from megalight.parallel.data_parallel import DataParallelEngine
from megalight.parallel.frozen import FrozenRun
from megalight.parallel.initial_values import broadcast_values
from megalight.parallel.model import ParallelModel, engine_over
from megalight.strategies import _lightning, refusals
from megalight.strategies.hooks import defines
from megalight.strategies.mesh_strategy import MeshStrategy
from megalight.strategies.user_module import options_for, root_of, seed_of

log = logging.getLogger(__name__)

SPLIT = "megalight_model"
"""Attribute of a root that is split: its parallel model, with which another Trainer in this process may go on."""


def build(strategy: MeshStrategy, module: pl.LightningModule, resumes: bool) -> ParallelModel:
    """Split the module's model, and say where its values come from; parameters have no memory yet.

    Args:
        resumes: a checkpoint will be read into it, and not the module's own source.
    """
    root = root_of(module)
    assert strategy.streams is not None
    seed = int(strategy.broadcast(torch.initial_seed()))
    model = strategy.parallel_model = _split_before(strategy, module, root) or _split(strategy, module, root)
    precision = strategy.precision
    precision.device_type = strategy.root_device.type
    precision.plain = not isinstance(module, MegalightModule)
    refusals.check_no_codes(root)
    own_type = precision.plain and precision.precision not in ("64-true", "bf16-true")
    model.place(strategy.root_device, None if own_type else precision.dtype)
    module.to(strategy.root_device)
    source = None
    if isinstance(module, MegalightModule) and model.empty and not resumes:
        source = module.initial_weights()
    # draws come before a checkpoint, too: it lacks buffers that modules compute, and what strict=False lets be missing
    model.begin_from(seed_of(module, seed), source)
    model.recompute(strategy.recompute)
    precision.prepare(root, strategy.mesh, model.num_layers)
    model.check_overlap()
    strategy.streams.seed(seed)
    return model


def build_frozen(strategy: MeshStrategy, module: pl.LightningModule) -> dict[str, FrozenRun]:
    """The models that run beside the module's own: held by the strategy, outside of the module's tree."""
    if not isinstance(module, MegalightModule):
        return {}
    dtype, device = strategy.precision.dtype, strategy.root_device
    declared = module.frozen_models().items()
    return {name: frozen.build(name, strategy.mesh, dtype, device) for name, frozen in declared}


def _split(strategy: MeshStrategy, module: pl.LightningModule, root: nn.Module) -> ParallelModel:
    _lightning.sync_layers(strategy, module)
    options = options_for(module, root, strategy.options)
    if isinstance(module, MegalightModule):
        module.check_model(root)
        module.token_multiple = options.token_multiple(strategy.mesh)
    else:
        broadcast_values(root, strategy.root_device)
    model = root.__dict__[SPLIT] = ParallelModel(root, strategy.mesh, options)
    return model


def _split_before(strategy: MeshStrategy, module: pl.LightningModule, root: nn.Module) -> ParallelModel | None:
    """What an earlier Trainer in this process has made of a model: training goes on with it."""
    model: ParallelModel | None = root.__dict__.get(SPLIT)
    if model is not None:
        model.check_same(strategy.mesh, replace(strategy.options, transforms=tuple(getattr(module, "transforms", ()))))
        model.origin = None  # somebody may have trained it
    return model


def build_engine(strategy: MeshStrategy, optimizer: Optimizer) -> DataParallelEngine:
    """The engine of one ``fit``, in whose storage values now are; the optimizer is pointed at its shards."""
    assert strategy.parallel_model is not None
    groups = [group["params"] for group in optimizer.param_groups]
    engine = engine_over([strategy.parallel_model], groups, strategy.data_parallel)
    shard_optimizer(optimizer, engine)
    return engine


HOOKS_BETWEEN_STEPS = (
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_validation_batch_start",
    "on_validation_epoch_start",
    "on_validation_start",
)
"""Hooks of callbacks and modules that run while parameters may still be on their way."""
METHODS_BETWEEN_STEPS = (
    *HOOKS_BETWEEN_STEPS,
    "lr_scheduler_step",
    "on_after_batch_transfer",
    "on_before_batch_transfer",
    "on_validation_model_eval",
    "on_validation_model_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
)
"""The same of modules, with the methods that callbacks do not have."""


def reads_weights_between_steps(module: pl.LightningModule, trainer: pl.Trainer) -> bool:
    """Whether the user's code runs between two steps, where it may read weights: gathering then ends with the step.

    A callback or module whose code there reads no weights says ``reads_weights = False``.
    """
    owners = [(callback, HOOKS_BETWEEN_STEPS) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    for owner, names in (*owners, (module, METHODS_BETWEEN_STEPS)):
        for name in names if getattr(owner, "reads_weights", True) else ():
            if defines(owner, name):
                log.info("%s defines %s: parameters are gathered before it runs", type(owner).__name__, name)
                return True
    return False


def seed_workers(dataloader: Any, rank: int, seed: int) -> Any:
    """Make DataLoader workers draw by data-parallel rank where Lightning would seed them by global rank.

    The loader, and a sampler that shuffles, get a generator of their own, the same on all ranks of a replica: the
    default one differs between pipeline stages, and a resumed run's dropout would differ if data drew from it.
    """
    if hasattr(dataloader, "generator") and dataloader.generator is None:
        dataloader.generator = torch.Generator().manual_seed(seed)
        sampler = getattr(dataloader, "sampler", None)
        if isinstance(sampler, RandomSampler) and sampler.generator is None:
            sampler.generator = dataloader.generator
    if getattr(dataloader, "num_workers", 0) and dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
    return dataloader
