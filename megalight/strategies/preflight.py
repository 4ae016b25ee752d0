"""Checks before any process or process group starts: one message, nothing written, and no rank that hangs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from megalight.data.sampler import GlobalBatchSampler
from megalight.models.module import MegalightModule
from megalight.parallel.groups import check_max_ctas
from megalight.parallel.split_by_options import check_split
from megalight.parallel.transform import apply_transforms
from megalight.strategies.checkpoints.resuming import open_saved
from megalight.strategies.meeting import check_address
from megalight.strategies.mesh_strategy import MeshStrategy, Part
from megalight.strategies.ordinary import check_early
from megalight.strategies.process_group import backend_of
from megalight.strategies.refusals import check_lazy, check_pruning, check_tuners
from megalight.strategies.setup import check_plain
from megalight.strategies.user_module import options_for
from megalight.types.zigzag import check_length

NAMED = ("best", "last", "hpc")
"""Values of ``ckpt_path`` that Lightning resolves later."""


def check(
    strategy: MeshStrategy, trainer: pl.Trainer | None, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Check the arguments of the trainer's ``function`` before it is called.

    Modules can have their own checks: ``check_data(datamodule)`` and ``check_checkpoint(entries)``. A callback with a
    method ``attach(module)`` can change the model that the module will build.

    Raises:
        ConfigurationError: processes cannot meet at MASTER_PORT; there is a limit on multiprocessors, but messages are
            not sent with NCCL; no plan says how to split the module; or a callback would prune layers that it cannot
            see whole.
        LayoutError: the model or the batch does not divide over the ranks.
        DataError: the data does not fit the model or the division of sequences.
        CheckpointError: the checkpoint is incomplete, has an unknown format, or is of another model.
    """
    check_address(strategy)
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    module: Any = given.get("model") or strategy.lightning_module
    data = next((value for value in given.values() if isinstance(value, pl.LightningDataModule)), None)
    # First, because a callback may change the model that is checked below.
    for callback in getattr(trainer, "callbacks", ()):
        if hasattr(callback, "attach"):
            callback.attach(module)
    check_max_ctas("data_parallel.max_ctas", strategy.data_parallel.max_ctas, backend_of(strategy))
    check_max_ctas("TensorOptions.max_ctas", strategy.tensor.max_ctas, backend_of(strategy))
    ranks = strategy.num_nodes * strategy.num_processes
    parts = strategy.parts(ranks)
    fitting = trainer if trainer is not None and trainer.state.fn == TrainerFn.FITTING else None
    if fitting is not None:
        check_tuners(fitting, module, data, ranks)
    for part in parts:
        strategy.check_module(module, part.mesh)
        if fitting is not None:
            check_early(strategy, fitting, module, part.mesh)
            check_pruning(fitting, module, part.mesh)
        if ranks > 1:
            if isinstance(module, MegalightModule):
                _split_on_meta(strategy, module, part)
            else:
                check_plain(strategy, module, part.mesh)
    mesh = parts[-1].mesh
    size = getattr(data, "global_batch_size", None)
    if isinstance(size, int):
        GlobalBatchSampler(size, size, num_replicas=mesh.dp)  # refuses what does not divide
    length = getattr(data, "sequence_length", None)
    if isinstance(length, int) and mesh.cp > 1:
        check_length(length, mesh.cp)
    if data is not None and hasattr(module, "check_data"):
        module.check_data(data)
    path = given.get("ckpt_path")
    if not path and isinstance(module, MegalightModule) and module.model is None:
        module.initial_weights()  # opens the folder, which checks that it exists, is complete and of this family
    if path and path not in NAMED:
        entries = open_saved(str(path), module).common
        if hasattr(module, "check_checkpoint"):
            module.check_checkpoint(entries)


def _split_on_meta(strategy: MeshStrategy, module: Any, part: Part) -> None:
    """Build the model without memory, and split a part of it like its first rank.

    This runs the module's ``build_model`` once more than training. We cannot keep this model: ``setup`` hooks, which
    may prepare what ``build_model`` needs, have not run yet, and with ``start_method="fork"`` or ``"spawn"`` another
    process trains. On the meta device the extra run needs no memory and little time.
    """
    built_elsewhere = type(module).configure_model is not MegalightModule.configure_model
    if built_elsewhere or module.model is not None:
        return
    # The state of the generator stays, so that the later real build draws the same values
    # as without this check.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = module.build_model()
        check_lazy(model)
        apply_transforms(model, module.transforms)
        module.check_model(model)
        model = part.take(model)
        options = options_for(module, model, part.options)
        check_split(model, part.mesh, options, strategy.precision.dtype, strategy.root_device)
        strategy.precision.check(model)
        for frozen in module.frozen_models().values():
            frozen.check(part.mesh, strategy.precision.dtype, strategy.root_device)
