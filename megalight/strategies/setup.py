"""Setup: from the user's module to this rank's part of a parallel model and its data-parallel engine.

docs/parallelism-order.md explains the order of the steps; :mod:`megalight.parallel.model` does them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import RandomSampler
from torchmetrics import Metric

from megalight.attachments import SPLIT
from megalight.errors import ConfigurationError, DataError
from megalight.models.module import MegalightModule
from megalight.nn.transformers_attention import use_attention
from megalight.optim import Muon, shard_optimizer
from megalight.optim.sharded import sharding_of
from megalight.parallel.apply import find_plan, parallelize, styles_for
from megalight.parallel.context.divided_calls import interfaces_of
from megalight.parallel.coupling import Coupling
from megalight.parallel.data_parallel import DataParallelEngine
from megalight.parallel.initial_values import broadcast_values
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import TOKEN_AXES, ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.model_plans import plan_for
from megalight.parallel.run_engine import engine_over
from megalight.parallel.step import StepDriver
from megalight.parallel.transform import apply_transforms
from megalight.strategies import _lightning, validation
from megalight.strategies.checkpoints.resuming import unsplit
from megalight.strategies.mesh_strategy import MeshStrategy
from megalight.strategies.step import guard_clipping, unguard_clipping
from megalight.strategies.user_module import defines, root_of, seed_of
from megalight.strategies.whole_model import outline
from megalight.types.batch import emptied


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
    model = strategy.parallel_model = _split_before(strategy, module, root) or _split(strategy, module, root_of(module))
    precision = strategy.precision
    precision.device_type = strategy.root_device.type
    precision.plain = not isinstance(module, MegalightModule)
    validation.check_no_quantized_weights(model.root)
    # Under Lightning, mixed precision leaves the parameters of a plain module in their own dtype.
    own_type = precision.plain and precision.precision not in ("64-true", "bf16-true")
    source = None
    if isinstance(module, MegalightModule) and model.empty and not resumes:
        source = module.initial_weights()
    # A seed even if a checkpoint follows: it lacks computed buffers and, with strict=False, perhaps parameters.
    model.prepare(
        strategy.root_device,
        None if own_type else precision.dtype,
        seed=seed_of(module, seed),
        source=source,
        convert=partial(precision.prepare, seed=seed),
    )
    module.to(strategy.root_device)
    if not keeps_random_state(module, strategy.mesh):
        strategy.streams.seed(seed)
    return model


def keeps_random_state(module: pl.LightningModule, mesh: ParallelMesh) -> bool:
    """Return whether torch's random state stays as it is: a plain module in one process draws as under Lightning."""
    return not isinstance(module, MegalightModule) and mesh.world_size == 1


def prepare(strategy: MeshStrategy, module: pl.LightningModule, step: StepDriver) -> None:
    """Give a step its frozen models, and let what runs on some ranks only know that."""
    if isinstance(module, MegalightModule):
        # The step holds them, so they are no submodules of the user's module.
        step.build_frozen(module.frozen_models(), strategy.precision.dtype)
    if (what := strategy.divides_steps) is not None:
        step.context = partial(strategy.part, what, step.context)


def _split(strategy: MeshStrategy, module: pl.LightningModule, root: nn.Module) -> ParallelModel:
    validation.check_lazy(root)
    use_attention(root)
    # Before the split: a batch norm cannot be replaced inside a layer that is split already.
    _lightning.sync_layers(strategy, module, strategy.mesh.group(*TOKEN_AXES))
    if isinstance(module, MegalightModule):
        # Of the whole model: patterns of adapters may match layers of a part that other ranks have.
        apply_transforms(root, module.transforms)
        module.check_model(root)
        root = module.model = strategy.take(root)
    else:
        # Each process may have built its layers from another random state.
        broadcast_values(root, strategy.root_device)
    # A plain module is divided where it stands, and cannot be built again.
    whole = None if isinstance(module, MegalightModule) or strategy.mesh.world_size == 1 else outline(root)
    model: ParallelModel = SPLIT.set(root, strategy.split(module, root))
    model.outline = whole
    return model


def check_plain(strategy: MeshStrategy, module: pl.LightningModule, mesh: ParallelMesh) -> None:
    """Refuse, before there are ranks, a plain module that they could not split.

    Raises:
        LayoutError: an earlier Trainer in this process split it in another way; or the plan names a module that is not
            there, or no experts for ``ep`` and ``etp``.
        ConfigurationError: no plan says what to split, a parameter has no shape yet, or a model is compiled or
            quantized.
    """
    before: ParallelModel | None = SPLIT.get(module)
    if before is not None:
        before.check_same(mesh, strategy.part_layout)
    elif module.automatic_optimization and not any(map(partial(defines, module), ("configure_model", "setup"))):
        # These hooks may add what has a plan or a shape, and manual optimization is refused later, with any plan.
        validation.check_lazy(module)
        validation.check_whole_models(module, mesh)
        styles_for(module, find_plan(module, mesh, strategy.part_layout), mesh)
        if strategy.part_layout.plan is None and mesh.cp == 1 and mesh.tp * mesh.ep * mesh.etp > 1:
            for name in interfaces_of(module):
                _split_outline(name, module.get_submodule(name), mesh, strategy.part_layout)


def _split_outline(name: str, model: nn.Module, mesh: ParallelMesh, layout: Layout) -> None:
    """Split a copy of a model of ``transformers`` without memory, so that heads and widths are refused early."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    copied = copy.deepcopy(model, memo=empty)
    plan = plan_for(copied)
    if plan is not None:
        parallelize(copied, plan, mesh, sequence_parallel=layout.sequence_parallel, prefix=f"{name}.")


def _split_before(strategy: MeshStrategy, module: pl.LightningModule, root: nn.Module) -> ParallelModel | None:
    """Return the model as an earlier Trainer in this process split it, and training continues with it.

    None: it was not split, or it was for one rank and is whole again now, to be split as this Trainer wants it.
    """
    model: ParallelModel | None = SPLIT.get(root)
    if model is not None:
        layout = replace(strategy.part_layout, transforms=tuple(getattr(module, "transforms", ())))
        alone = model.mesh.world_size == 1 < strategy.mesh.world_size
        if alone and isinstance(module, MegalightModule) and unsplit(module, model):
            return None
        model.check_same(strategy.mesh, layout)
        model.layout = replace(model.layout, recompute=layout.recompute)
        model.origin = None  # it may have been trained, so its values are no longer the initial ones
    return model


def build_engine(strategy: MeshStrategy, optimizer: Optimizer) -> DataParallelEngine:
    """Make the engine of one ``fit``. It now stores the values, and the optimizer updates its shards."""
    assert strategy.parallel_model is not None
    assert strategy.lightning_module is not None
    _check_optimized(strategy.lightning_module, optimizer)
    # Groups as the optimizer has them now, and no longer after `shard_optimizer` has put in its shards.
    groups = [group["params"] for group in optimizer.param_groups]
    plain = not isinstance(strategy.lightning_module, MegalightModule)
    options = strategy.data_parallel.finding_unused(plain)
    engine = engine_over([strategy.parallel_model], groups, options, some=plain)
    shard_optimizer(optimizer, engine)
    if isinstance(optimizer, Muon):
        optimizer.watch(strategy.parallel_model)
    guard_clipping(strategy.parallel_model, optimizer)
    return engine


def _check_optimized(module: pl.LightningModule, optimizer: Optimizer) -> None:
    """Refuse parameters of a Megalight module outside its model, which would be neither averaged nor saved."""
    if not isinstance(module, MegalightModule) or module.model is None:
        return
    inside = set(map(id, module.model.parameters()))
    names = {id(parameter): name for name, parameter in module.named_parameters() if id(parameter) not in inside}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if outside := [names[id(parameter)] for parameter in given if id(parameter) in names]:
        raise ConfigurationError(
            f"the optimizer was given {', '.join(outside)} of {type(module).__name__}, outside of its model: only "
            f"{type(module.model).__name__} is divided, averaged over replicas and saved. Add such parameters to the "
            "model, in build_model, or freeze them, requires_grad_(False), and give the optimizer the others only."
        )


def close_engine(strategy: MeshStrategy, engine: DataParallelEngine, optimizer: Optimizer) -> None:
    """Close the engine of a ``fit`` that came to its end. The user's own code may go on with module and optimizer."""
    assert strategy.parallel_model is not None
    # The shards first take over what hooks have written to whole weights.
    engine.release_parameters()
    engine.close()
    unguard_clipping(strategy.parallel_model)
    sharding = sharding_of(optimizer)
    if sharding is not None and not sharding.divided:
        sharding.end()


def process_loader(strategy: MeshStrategy, dataloader: Any) -> Any:
    """Seed workers by replica, so that all ranks of one replica get the same augmentation.

    If replicas communicate in forward passes, all their loaders give equally many batches; some may be empty.
    """
    if strategy.streams is None or strategy.parallel_model is None:  # before setup, replicas are not known
        return dataloader
    assert strategy.lightning_module is not None
    if not keeps_random_state(strategy.lightning_module, strategy.mesh):
        dataloader = seed_workers(dataloader, strategy.streams.replica, strategy.streams.data_seed)
    coupling = strategy.parallel_model.coupling
    return dataloader if coupling is None else padded_loader(dataloader, coupling)


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


# Loaders with equally many batches on all ranks, for forward passes that communicate


def padded_loader(loader: Any, coupling: Coupling) -> Any:
    """Return a loader with as many batches as the longest loader of all ranks. It adds empty batches at its end.

    All ranks along ``dp`` call this together. Loaders of equal lengths are returned unchanged.

    Raises:
        DataError: a loader has no batch, so no empty batch can be made from it. All ranks raise.
    """
    try:
        length = len(loader)
    except TypeError:
        return _AgreedLoader(loader, coupling)
    # a maximum of negated lengths is the negated minimum
    longest, shortest = coupling.most(length), -coupling.most(-length)
    if longest == shortest:
        return loader
    if not shortest:
        raise DataError(
            f"a data-parallel rank has no batch while another has {longest}, and ranks that share experts must run "
            "equally many. Give each at least one batch."
        )
    return _PaddedLoader(loader, longest)


class _PaddedLoader:
    """A loader of known length, filled up with empty batches. Other attributes are the loader's."""

    def __init__(self, loader: Any, length: int) -> None:
        self.loader = loader
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        batch = None
        for batch in self.loader:
            yield batch
        # The last batch again, as `Empty` says. Its losses are multiplied by zero.
        for _ in range(self.length - len(self.loader)):
            yield emptied(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)


class _AgreedLoader:
    """A loader of unknown length. Before each batch, ranks check whether any of them has another batch."""

    def __init__(self, loader: Any, coupling: Coupling) -> None:
        self.loader = loader
        self.coupling = coupling

    def __iter__(self) -> Iterator[Any]:
        end = object()
        batches, last = iter(self.loader), end
        while True:
            batch = next(batches, end)
            # On the host, before the batch is used: a rank that stops alone would leave others in a collective.
            if not self.coupling.most(batch is not end):
                return
            if batch is end and last is end:
                raise DataError("this rank's loader has no batch to repeat while another rank's goes on; give it one.")
            last = last if batch is end else batch
            yield emptied(last) if batch is end else batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)
