"""The data-parallel engine of one training run, over all its trainable models, and the values in its storage."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.nn.moe import MoE
from megalight.parallel.coupling import Coupling
from megalight.parallel.data_parallel import DataParallel, DataParallelEngine, ParamInfo
from megalight.parallel.initial_values import initialise
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.source import Source, clear_outside, parameter_targets, shard_targets
from megalight.parallel.units import Unit, check_units, owned_alone, units_of

log = logging.getLogger(__name__)


def engine_over(
    models: Sequence[ParallelModel],
    groups: Sequence[Iterable[nn.Parameter]],
    options: DataParallel,
    *,
    some: bool = False,
) -> DataParallelEngine:
    """Create the data-parallel engine of one training run. It takes over the storage of the parameters.

    Args:
        models: the trainable parts of the run, each on a mesh over the same ranks. If there are several, the engine
            names a parameter by its part's name and its local name.
        groups: the parameters of each group of the optimizer.
        some: whether trainable parameters may be in no group. They then stay as they are, with a warning.

    Raises:
        ConfigurationError: a parameter of the optimizer belongs to no part, a trainable one is in no group, or pipeline
            stages have different numbers of groups. Or the level shards what cannot be sharded.
    """
    for model in models:
        options.check(model.mesh.pp)
        # An earlier run may have sharded them, and new buffers are cut from whole parameters.
        model.unshard()
    units = _units(models, options)
    if units and any(model.options.pipeline.schedule == "combined" for model in models):
        raise ConfigurationError(
            f"data_parallel.level={options.level!r} with pipeline.schedule='combined': a forward and a backward would "
            "gather and free the same unit. Use level 'optim', or another schedule."
        )
    numbers = {key: number for model in models for key, number in owned_alone(model.root, units).items()}
    named = {id(p): (model, name) for model in models for name, p in model.root.named_parameters()}
    parts = [part for model in models for part in model.chunks]
    places = reversed(list(enumerate(parts)))  # the first chunk wins: a parameter of several is complete with it
    chunks = {id(parameter): place for place, part in places for parameter in part.parameters()}
    whole = "" if len(models) == 1 else "{}."
    infos = {}  # by id: a tied parameter comes once
    for index, group in enumerate(groups):
        for parameter in group:
            if id(parameter) not in named:
                kinds = " or ".join(type(model.root).__name__ for model in models)
                raise ConfigurationError(
                    f"the optimizer was given a parameter of shape {tuple(parameter.shape)} that is not part of "
                    f"{kinds}; return an optimizer over self.parameters()."
                )
            model, name = named[id(parameter)]
            full, chunk = whole.format(model.name) + name, chunks.get(id(parameter), 0)
            unit = numbers.get(id(parameter))
            infos[id(parameter)] = ParamInfo(full, parameter, model.specs[name], index, chunk, model.mesh, unit)
    missing = [
        name
        for model in models
        for name, parameter in model.root.named_parameters()
        if parameter.requires_grad and id(parameter) not in infos
    ]
    if missing:
        others = f" (nor {len(missing) - 1} others)" if len(missing) > 1 else ""
        text = (
            f"{missing[0]} requires gradients, but the optimizer does not hold it{others}. Add it to a parameter "
            "group, or freeze it with requires_grad_(False)."
        )
        if not some:
            raise ConfigurationError(text)
        log.warning(text)
    for model in models:
        # A collective over the pipeline, so it comes after all errors that every rank finds alone.
        _check_equal_groups(model.mesh, len(groups))
    # Frozen weights of units are sharded too, or they would take the memory that sharding saves.
    if options.shards_parameters:
        for model in models:
            for name, parameter in model.root.named_parameters():
                if not parameter.requires_grad and id(parameter) in numbers:
                    full, unit = whole.format(model.name) + name, numbers[id(parameter)]
                    infos[id(parameter)] = ParamInfo(full, parameter, model.specs[name], 0, 0, model.mesh, unit)
    # In registration order, which decides the order of buckets; the optimizer may list parameters in another one.
    ordered = [infos[key] for key in named if key in infos]
    engine = options.engine(ordered, models[0].mesh, models[0].device, units)
    for model in models:
        model.shards = engine.units
        # Units are gathered in forward passes, so all data-parallel ranks must run the same
        # number of micro-batches.
        if engine.units is not None and model.coupling is None:
            model.coupling = Coupling(model.mesh)
        # Only now: values are written into the engine's storage.
        _fill(engine, model, whole.format(model.name))
    for choice, reason in engine.unit_memory.reasons.items():
        log.info("%s of units: %s", choice, reason)
    for kind, size in engine.memory().items():
        log.info("%s: %.3f GiB on this rank", kind, size / 2**30)
    return engine


def _units(models: Sequence[ParallelModel], options: DataParallel) -> list[Unit]:
    if not options.has_units:
        return []
    units = [unit for model in models for unit in units_of(model.root, options.units)]
    check_units(units)
    _check_streams(models, units)
    if not units:
        log.warning(
            "data_parallel.level=%r: %s has no repeated layers, so that its gradients and parameters stay whole. Name "
            "the classes to shard in data_parallel.units.",
            options.level,
            " and ".join(type(model.root).__name__ for model in models),
        )
    return units


def _check_streams(models: Sequence[ParallelModel], units: Sequence[Unit]) -> None:
    """Refuse units that compute beside others: their buffers would be used again too early.

    Raises:
        ConfigurationError: a shared expert with a stream of its own contains a unit.
    """
    layers = [part for model in models for part in model.root.modules() if isinstance(part, MoE)]
    shared = [layer.shared for layer in layers if layer.shared is not None and layer.shared_expert_overlap]
    aside = {id(part) for expert in shared for part in expert.modules()}
    for module in (module for unit in units for module in unit):
        if id(module) in aside:
            raise ConfigurationError(
                f"data_parallel.units names {type(module).__name__}, which is also (a part of) a shared expert, and "
                "ExpertOptions(shared_expert_overlap=True) computes that beside the other experts. Name the layer that "
                "contains both, or leave shared_expert_overlap out."
            )


def _fill(engine: DataParallelEngine, model: ParallelModel, prefix: str) -> None:
    """Write values into the engine's storage: parameters and masters get the same draws, or the same read.

    If there are values already, only masters that are wider than their parameters are filled again from the origin.
    """
    origin, pending = model.origin, model.pending
    model.origin, model.pending, model.filled = None, False, True
    # Masters in the parameters' own memory get their values with the parameters.
    copies = any(not bucket.master_is_own_params for bucket in engine.buckets)
    model.allocate()  # memory for parameters in no bucket, which are frozen
    if origin is None or not (pending or copies):
        return

    def give(name: str, values: Tensor) -> None:
        engine.fill_masters(prefix + name, values)

    engine.sync_parameters()  # with 8-bit codes a gather is in flight from the start; it must not overwrite new values
    if origin.seed is not None:
        sharded = engine.units is not None and bool(engine.units.buckets)
        on_values = give if copies or sharded else None
        later = model.made_after_split
        initialise(model.root, model.specs, origin.seed, on_values=on_values, only=origin.only, later=later)
        # Draws went to the shards alone. Whole parameters come from there.
        if sharded:
            engine.publish()
        else:
            engine.recast()
    if origin.source is not None:
        _read(engine, model, origin.source, pending)


def _read(
    engine: DataParallelEngine,
    model: ParallelModel,
    source: Source,
    pending: bool,
) -> None:
    """Read each rank's shards, and gather parameters from them; ``pending``: also read tensors that are in no shard."""
    # frozen parameters have no masters, so there is nothing to read for them if they have values
    shards = [*engine.shards, *(bucket.shard for bucket in engine.frozen if pending)]
    # A source fills pieces only, and padding must be zero in parameters and masters.
    model.clear_padding()
    for shard in shards:
        intervals = ((start, start + last - first) for _, first, last, start in shard.intervals())
        clear_outside(shard.master.detach().view(-1), intervals)
    found = shard_targets([shard.master for shard in shards], shards)
    targets = [target for target in found if target.name.startswith(model.prefix)]
    if pending:
        held = {id(info.parameter) for bucket in (*engine.buckets, *engine.frozen) for info in bucket.infos}
        others = [(name, tensor) for name, tensor in model.tensors().items() if id(tensor) not in held]
        targets += parameter_targets(others, model.specs)
    # The source may be older than the adapters. They keep their initial values then.
    if model.added.isdisjoint(source.tensors):
        targets = [target for target in targets if target.name not in model.added]
    source.fill(targets, strict=pending, prefix=model.prefix)
    # Masters were read. Parameters follow from them now, because evaluation may come before the next step.
    engine.publish()
    engine.sync_parameters()


def _check_equal_groups(mesh: ParallelMesh, count: int) -> None:
    """Check that all pipeline stages have the same number of groups; checkpoints know a group by its number."""
    group = mesh.group("pp")
    if group is None:
        return
    counts: list[Any] = [None] * group.size()
    dist.all_gather_object(counts, count, group=group)
    if len(set(counts)) > 1:
        raise ConfigurationError(
            f"configure_optimizers made {counts} parameter groups on the pipeline's ranks; make the same ones "
            "everywhere, without parameters where a stage has none."
        )
