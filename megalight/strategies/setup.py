"""Setup: from the user's module to this rank's part of a parallel model and its data-parallel engine.

docs/parallelism-order.md explains the order of the steps; :mod:`megalight.parallel.model` does them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import RandomSampler
from torchmetrics import Metric

from megalight.models.module import MegalightModule
from megalight.optim import shard_optimizer
from megalight.parallel.data_parallel import DataParallelEngine
from megalight.parallel.frozen import FrozenRun
from megalight.parallel.initial_values import broadcast_values
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.run_engine import engine_over
from megalight.parallel.transform import apply_transforms
from megalight.strategies import _lightning, refusals
from megalight.strategies.hooks import defines
from megalight.strategies.mesh_strategy import MeshStrategy
from megalight.strategies.user_module import root_of, seed_of
from megalight.strategies.whole_model import outline

log = logging.getLogger(__name__)

SPLIT = "megalight_model"
"""Attribute of a split root with its parallel model, so that another Trainer in this process can continue with it."""


def return_metrics(module: pl.LightningModule, device: torch.device) -> None:
    """Move the module's metrics to the device. Lightning's loops leave logged metrics on the CPU when they end."""
    for part in module.modules():
        if isinstance(part, Metric):
            part.to(device)


def build(strategy: MeshStrategy, module: pl.LightningModule, resumes: bool) -> ParallelModel:
    """Split the module's model, and set the source of its values. Parameters have no memory yet.

    Args:
        resumes: whether a checkpoint will be read into it instead of the module's initial weights.
    """
    # The same seed on all ranks, or shared weights would begin with different values.
    root = root_of(module)
    assert strategy.streams is not None
    seed = int(strategy.broadcast(torch.initial_seed()))
    model = strategy.parallel_model = _split_before(strategy, module, root) or _split(strategy, module, root)
    precision = strategy.precision
    precision.device_type = strategy.root_device.type
    precision.plain = not isinstance(module, MegalightModule)
    refusals.check_no_codes(model.root)
    # Under Lightning, mixed precision leaves the parameters of a plain module in their own dtype.
    own_type = precision.plain and precision.precision not in ("64-true", "bf16-true")
    model.place(strategy.root_device, None if own_type else precision.dtype)
    module.to(strategy.root_device)
    source = None
    if isinstance(module, MegalightModule) and model.empty and not resumes:
        source = module.initial_weights()
    # draw values even if a checkpoint follows: it lacks computed buffers and, with strict=False, perhaps parameters
    model.begin_from(seed_of(module, seed), source)
    # After the split, because it wraps the parallel layers.
    model.recompute(strategy.options.recompute)
    precision.prepare(model, seed)
    model.check_device()
    if not keeps_random_state(module, strategy.mesh):
        strategy.streams.seed(seed)
    return model


def keeps_random_state(module: pl.LightningModule, mesh: ParallelMesh) -> bool:
    """Return whether torch's random state stays as it is: a plain module in one process draws as under Lightning."""
    return not isinstance(module, MegalightModule) and mesh.world_size == 1


def build_frozen(strategy: MeshStrategy, module: pl.LightningModule) -> dict[str, FrozenRun]:
    """Build the frozen models. The strategy holds them, so they are no submodules of the user's module."""
    if not isinstance(module, MegalightModule):
        return {}
    dtype, device = strategy.precision.dtype, strategy.root_device
    declared = module.frozen_models().items()
    return {name: frozen.build(name, strategy.mesh, dtype, device) for name, frozen in declared}


def _split(strategy: MeshStrategy, module: pl.LightningModule, root: nn.Module) -> ParallelModel:
    # Before the split: a batch norm cannot be replaced inside a layer that is split already.
    _lightning.sync_layers(strategy, module)
    if isinstance(module, MegalightModule):
        # Of the whole model: patterns of adapters may match layers of a part that other ranks have.
        apply_transforms(root, module.transforms)
        module.check_model(root)
        root = module.model = strategy.take(root)
        module.token_multiple = strategy.options.token_multiple(strategy.mesh)
    else:
        # Each process may have built its layers from another random state.
        broadcast_values(root, strategy.root_device)
    # A plain module is divided where it stands, and cannot be built again.
    whole = None if isinstance(module, MegalightModule) or strategy.mesh.world_size == 1 else outline(root)
    model = root.__dict__[SPLIT] = strategy.split(module, root)
    model.outline = whole
    return model


def _split_before(strategy: MeshStrategy, module: pl.LightningModule, root: nn.Module) -> ParallelModel | None:
    """Return the model as an earlier Trainer in this process split it, or None. Training continues with it."""
    model: ParallelModel | None = root.__dict__.get(SPLIT)
    if model is not None:
        model.check_same(strategy.mesh, replace(strategy.options, transforms=tuple(getattr(module, "transforms", ()))))
        model.origin = None  # it may have been trained, so its values are no longer the initial ones
    return model


def build_engine(strategy: MeshStrategy, optimizer: Optimizer) -> DataParallelEngine:
    """Make the engine of one ``fit``. It now stores the values, and the optimizer updates its shards."""
    assert strategy.parallel_model is not None
    # Groups as the optimizer has them now, and no longer after `shard_optimizer` has put in its shards.
    groups = [group["params"] for group in optimizer.param_groups]
    plain = not isinstance(strategy.lightning_module, MegalightModule)
    engine = engine_over([strategy.parallel_model], groups, strategy.data_parallel, some=plain)
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
"""Hooks of callbacks and modules that run while parameters may still be gathered."""
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
"""The same hooks for modules, and methods that only modules have."""


HOOKS_OF_SHARDED_WEIGHTS = (
    "on_sanity_check_end",
    "on_sanity_check_start",
    "on_train_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_validation_epoch_end",
)
"""Further hooks in which all weights are there unless each rank keeps only a shard of them."""
HOOKS_BEFORE_UPDATE = ("configure_gradient_clipping", "on_after_backward", "on_before_optimizer_step")
"""Hooks between the backward passes and the update. Sharded weights are not whole there, either."""


def reads_weights_between_steps(module: pl.LightningModule, trainer: pl.Trainer, sharded: bool = False) -> bool:
    """Return whether the user's code runs between steps and may read weights. If so, each step ends with the gather.

    Set ``reads_weights = False`` on a callback or module that reads no weights there.

    Args:
        sharded: between steps, each rank keeps only a shard of the weights.
    """
    if any(isinstance(callback, ModelPruning) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        return True
    more = (*HOOKS_OF_SHARDED_WEIGHTS, *HOOKS_BEFORE_UPDATE) if sharded else ()
    return _defines_any(module, trainer, (*HOOKS_BETWEEN_STEPS, *more), (*METHODS_BETWEEN_STEPS, *more))


def reads_weights_before_update(module: pl.LightningModule, trainer: pl.Trainer) -> bool:
    """Return whether the user's code runs between backward passes and update, and may read weights."""
    return _defines_any(module, trainer, HOOKS_BEFORE_UPDATE, HOOKS_BEFORE_UPDATE)


def _defines_any(
    module: pl.LightningModule, trainer: pl.Trainer, of_callbacks: Sequence[str], of_module: Sequence[str]
) -> bool:
    owners = [(callback, of_callbacks) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    for owner, names in (*owners, (module, of_module)):
        for name in names if getattr(owner, "reads_weights", True) else ():
            if hasattr(owner, name) and defines(owner, name):
                log.info("%s defines %s: parameters are gathered before it runs", type(owner).__name__, name)
                return True
    return False


def seed_workers(dataloader: Any, rank: int, seed: int) -> Any:
    """Seed DataLoader workers by data-parallel rank. Lightning would seed them by global rank.

    The loader and a shuffling sampler get their own generator, the same on all ranks of a replica. The default
    generator differs between pipeline stages, and dropout of a resumed run would differ if the data used it too.
    """
    if hasattr(dataloader, "generator") and dataloader.generator is None:
        dataloader.generator = torch.Generator().manual_seed(seed)
        batches = getattr(dataloader, "batch_sampler", None)
        for sampler in (getattr(dataloader, "sampler", None), getattr(batches, "sampler", None)):
            # The sampler draws from its own generator, which all ranks of a replica must share, or they
            # would read other samples.
            if isinstance(sampler, RandomSampler) and sampler.generator is None:
                sampler.generator = dataloader.generator
    if getattr(dataloader, "num_workers", 0) and dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
    return dataloader
