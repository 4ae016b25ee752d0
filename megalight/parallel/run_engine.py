"""The data-parallel engine of one training run: its units, one storage for all trainable models, and their values."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.first_rank import is_first
from megalight.nn.moe import MoE
from megalight.parallel.coupling import Coupling
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions, ParamInfo
from megalight.parallel.data_parallel.unit_memory import PassOrder, UnitPass
from megalight.parallel.initial_values import initialize
from megalight.parallel.layers import depth_layers_of, layers_of, tower_layers_of
from megalight.parallel.model import ParallelModel
from megalight.parallel.pipeline.executor import passes_of
from megalight.parallel.pipeline.schedules import build
from megalight.parallel.recompute import Member
from megalight.parallel.source import Source, clear_outside, parameter_targets, shard_targets
from megalight.parallel.transform import unknown_to

log = logging.getLogger(__name__)

ROUNDS = 4
"""Micro-batches of a typical step, per pipeline rank."""


def engine_over(
    models: Sequence[ParallelModel],
    groups: Sequence[Iterable[nn.Parameter]],
    options: DataParallelOptions,
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
            stages have different groups. Or the level shards what cannot be sharded.
    """
    for model in models:
        options.check(model.layout.pipeline.schedule)
        # An earlier run may have sharded them, and new buffers are cut from whole parameters.
        model.unshard()
    units = _units(models, options)
    known = _Parameters(models, units)
    infos = {id(parameter): known.info(parameter, index) for index, group in enumerate(groups) for parameter in group}
    if missing := [name for name, parameter in known.trainable() if id(parameter) not in infos]:
        others = f" (nor {len(missing) - 1} others)" if len(missing) > 1 else ""
        text = (
            f"{missing[0]} requires gradients, but the optimizer does not hold it{others}. Add it to a parameter "
            "group, or freeze it with requires_grad_(False)."
        )
        if not some:
            raise ConfigurationError(text)
        if is_first():
            log.warning(text)
    for model in models:
        # A collective over the pipeline, so it comes after all errors that every rank finds alone.
        _check_equal_groups(model, len(groups), {key: info.group for key, info in infos.items()})
    # Frozen weights of units are sharded too, or they would take the memory that sharding saves.
    if options.shards_parameters:
        infos |= {id(parameter): known.info(parameter, 0) for parameter in known.frozen_of_units()}
    # In registration order, which decides the order of buckets; the optimizer may list parameters in another one.
    ordered = [infos[key] for key in known.named if key in infos]
    engine = DataParallelEngine(
        ordered, models[0].mesh, options, device=models[0].device, units=units, route=_route(models)
    )
    for model in models:
        model.shards = engine.units
        # Units are gathered in forward passes, so all data-parallel ranks must run the same
        # number of micro-batches. So must pipeline stages without units.
        if options.has_units and model.mesh.dp > 1 and model.coupling is None:
            model.coupling = Coupling(model.mesh)
        # Only now: values are written into the engine's storage.
        _fill(engine, model, known.prefix(model))
    for choice, reason in engine.unit_memory.reasons.items():
        log.info("%s: %s", choice, reason)
    for kind, size in engine.memory().items():
        log.info("%s: %.3f GiB on this rank", kind, size / 2**30)
    return engine


class _Parameters:
    """All parameters of the models, and what an engine must know of each.

    Attributes:
        named: id of a parameter -> its model, its name there, and itself, in registration order.
    """

    def __init__(self, models: Sequence[ParallelModel], units: Sequence[Unit]) -> None:
        self.models = models
        self.named = {id(p): (model, name, p) for model in models for name, p in model.root.named_parameters()}
        self._units = {key: number for model in models for key, number in owned_alone(model.root, units).items()}
        chunks = [chunk for model in models for chunk in model.chunks]
        # The first chunk wins, so it comes last here: a parameter of several is complete with it.
        places = reversed(list(enumerate(chunks)))
        self._chunks = {id(parameter): place for place, chunk in places for parameter in chunk.parameters()}

    def prefix(self, model: ParallelModel) -> str:
        """Return what the engine's names of a model's parameters begin with."""
        return "" if len(self.models) == 1 else f"{model.name}."

    def info(self, parameter: Tensor, group: int) -> ParamInfo:
        """Return what the engine must know of a parameter in an optimizer's group.

        Raises:
            ConfigurationError: no model has the parameter.
        """
        key = id(parameter)
        if key not in self.named:
            kinds = " or ".join(type(model.root).__name__ for model in self.models)
            raise ConfigurationError(
                f"the optimizer was given a parameter of shape {tuple(parameter.shape)} that is not part of "
                f"{kinds}; return an optimizer over self.parameters()."
            )
        model, name, own = self.named[key]
        full, chunk, mesh = self.prefix(model) + name, self._chunks.get(key, 0), model.mesh_of(name)
        return ParamInfo(full, own, model.specs[name], group, chunk, mesh, self._units.get(key))

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the local name of each parameter that needs a gradient, and the parameter."""
        return ((name, parameter) for _, name, parameter in self.named.values() if parameter.requires_grad)

    def frozen_of_units(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of units that need no gradient."""
        return (p for key, (_, _, p) in self.named.items() if not p.requires_grad and key in self._units)


def _route(models: Sequence[ParallelModel]) -> PassOrder:
    """The chunks of all models, and the order of passes through them in a long step."""
    chunks, passes, phases = list[nn.Module](), list[UnitPass](), list[range]()
    for model in models:
        pipeline, pp, first = model.layout.pipeline, model.mesh.pp, len(chunks)
        chunks += model.chunks
        # Long enough for several rounds of all chunks. Without a pipeline, each pass returns the way of the last one.
        if pp > 1:
            actions = build(pipeline.schedule, pp, model.pipeline_layout.vpp, ROUNDS * pp, pipeline.group_size)
            found = passes_of(actions[model.mesh.rank("pp")])
            passes += [step._replace(chunk=first + step.chunk) for step in found]
        phases.append(range(first, len(chunks)))
    # Last, as the chunks of the others contain their modules. But they run first.
    grafted = [model.grafted.root for model in models if model.grafted is not None]
    phases = [range(len(chunks), len(chunks) + len(grafted)), *phases] if grafted else phases
    return PassOrder([*chunks, *grafted], passes, phases)


def _units(models: Sequence[ParallelModel], options: DataParallelOptions) -> list[Unit]:
    if not options.has_units:
        return []
    units = [unit for model in models for unit in _units_of(model, options)]
    check_units(units)
    _check_streams(models, units)
    if not units and all(model.mesh.pp == 1 for model in models) and is_first():
        log.warning(
            "data_parallel.level=%r: %s has no repeated layers, so that its gradients and parameters stay whole. Name "
            "the classes to shard in data_parallel.units.",
            options.level,
            " and ".join(type(model.root).__name__ for model in models),
        )
    return units


def _units_of(model: ParallelModel, options: DataParallelOptions) -> list[Unit]:
    """Return the units of a model on this rank. Each class must be found on some stage of its pipeline.

    Raises:
        ConfigurationError: a class is nowhere, or holds a part that runs by itself.
    """
    sought = options.units
    if sought and model.mesh.pp > 1:
        # A class may be on other stages only, and that is no mistake.
        here = [any(_has_class(module, wanted) for module in model.root.modules()) for wanted in sought]
        stages: list[Any] = [None] * model.mesh.pp
        dist.all_gather_object(stages, here, group=model.mesh.group("pp"))
        elsewhere = [any(held) and not own for own, *held in zip(here, *stages, strict=True)]
        sought = tuple(kind for kind, away in zip(options.units, elsewhere, strict=True) if not away)
        if not sought:
            return []
    found = units_of(model.root, sought)
    if model.grafted is None:
        return found
    # It runs by itself, so what holds it in the root is not called around it.
    holder = getattr(model.root, "embed", None)
    if sought and any(holder in unit for unit in found):
        raise ConfigurationError(
            f"data_parallel.units names {type(holder).__name__}, which holds a part with a layout of its own, and "
            "that part runs by itself. Name the class of the layers, or leave units out."
        )
    if sought:
        return found
    # In its place the embedding of the tokens, which later stages of a pipeline lack.
    word = getattr(holder, "word", None)
    instead = () if word is None else (word,)
    inside = set(map(id, model.grafted.root.modules()))
    own = [instead + unit[1:] if unit[0] is holder else unit for unit in found]
    return [*units_of(model.grafted.root), *(unit for unit in own if unit and id(unit[0]) not in inside)]


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

    engine.sync_parameters()  # with 8-bit values a gather is in flight from the start; it must not overwrite new values
    if origin.seed is not None:
        sharded = engine.units is not None and bool(engine.units.buckets)
        on_values = give if copies or sharded else None
        later = model.made_after_split
        initialize(model.root, model.specs, origin.seed, on_values=on_values, only=origin.only, later=later)
        # Draws went to the shards alone. Whole parameters come from there.
        if sharded:
            engine.publish()
        else:
            engine.parameters.recast()
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
    shards = [*engine.shards, *(bucket.shard for bucket in engine.frozen_shards.buckets if pending)]
    # A source fills pieces only, and padding must be zero in parameters and masters.
    model.clear_padding()
    for shard in shards:
        intervals = ((start, start + last - first) for _, first, last, start in shard.intervals())
        clear_outside(shard.master.detach().view(-1), intervals)
    found = shard_targets([shard.master for shard in shards], shards)
    targets = [target for target in found if target.name.startswith(model.prefix)]
    if pending:
        held = {
            id(info.parameter) for bucket in (*engine.buckets, *engine.frozen_shards.buckets) for info in bucket.infos
        }
        others = [(name, tensor) for name, tensor in model.tensors().items() if id(tensor) not in held]
        targets += parameter_targets(others, model.specs)
    # The source may be older than an adapter, which keeps its initial values then.
    lacking = unknown_to(source.tensors, model.made)
    targets = [target for target in targets if target.name not in lacking]
    source.fill(targets, strict=pending, prefix=model.prefix)
    # Masters were read. Parameters follow from them now, because evaluation may come before the next step.
    engine.publish()
    engine.sync_parameters()


def _check_equal_groups(model: ParallelModel, count: int, group_of: Mapping[int, int]) -> None:
    """Check that all pipeline stages have the same number of groups; checkpoints know a group by its number.

    A weight that several stages hold must be in one group: each stage updates its own copy.
    """
    group = model.mesh.group("pp")
    if group is None:
        return
    # A tied weight has another local name on each stage.
    shared = {
        model.specs[name].pieces[0].name: group_of.get(id(parameter))
        for name, parameter in model.root.named_parameters()
        if any(axis.startswith("pp") for axis in model.specs[name].pieces[0].partial)
    }
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (count, shared), group=group)
    counts = [each for each, _ in found]
    if len(set(counts)) > 1:
        raise ConfigurationError(
            f"configure_optimizers made {counts} parameter groups on the pipeline's ranks; make the same ones "
            "everywhere, without parameters where a stage has none."
        )
    for name in dict.fromkeys(name for _, held in found for name in held):
        numbers = {rank: held[name] for rank, (_, held) in enumerate(found) if name in held}
        if len(set(numbers.values())) > 1:
            where = ", ".join(f"{number} on pipeline rank {rank}" for rank, number in numbers.items())
            raise ConfigurationError(
                f"configure_optimizers put {name} into different parameter groups: {where}. It is one weight, which "
                "has another name on each of these ranks if it is tied; put it into the same group everywhere."
            )


LISTS = nn.ModuleList | nn.ModuleDict
CONTAINERS = LISTS | nn.Sequential


Unit = tuple[nn.Module, ...]
"""Modules whose parameters are gathered together; nearly always one."""


def units_of(model: nn.Module, classes: Sequence[str | type] = ()) -> list[Unit]:
    """Return the units of a model in the order in which it registers them. No unit contains another.

    In a model with ``layers``, its ``embed`` and ``head`` are units, too, if they have modules of their own: then no
    other module reads their weights. If they share a weight, they are one unit. Layers of multi-token prediction are
    units like all layers.

    Args:
        classes: classes of units, or their names. If the first and the last module of these share a weight, as an
            embedding and a head do, they are one unit. Empty: the layers of the model, or the members of every list of
            at least two modules of one class that have modules of their own; of a layer that is a list, its parts.

    Raises:
        ConfigurationError: no module is of a given class.
    """
    if not classes:
        layers: list[Unit] = [(part,) for layer in layers_of(model).values() for part in _called(layer)]
        if not layers:
            # A tower without a language model behind it: what holds tower and projectors is not called.
            alone = tower_layers_of(model).values() or _repeated(model)
            return [(module,) for module in alone]
        # Other modules may read the weight of a bare embedding or head, outside of its
        # forward. Those stay whole.
        first, last, depths = _edge(model, "embed"), _edge(model, "head"), depth_layers_of(model).values()
        # A shared weight is needed at both ends, so it is gathered with both.
        if first and last and _parameters(*first) & _parameters(*last):
            first, last = first + last, ()
        return [unit for unit in (first, *layers, last, *((depth,) for depth in depths)) if unit]
    found = list(_of_classes(model, classes))
    for wanted in classes:
        if not any(_has_class(unit, wanted) for unit in found):
            name = wanted if isinstance(wanted, str) else wanted.__name__
            kinds = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
            raise ConfigurationError(
                f"data_parallel.units names {name!r}, and no outermost module of {type(model).__name__} is one; it has "
                f"{kinds}. Name the class of its layers."
            )
    return _tied([(module,) for module in found])


def _tied(units: list[Unit]) -> list[Unit]:
    """Make one unit of the first and the last module if they share a weight and are no layers of one class."""
    first, last = units[0], units[-1]
    if type(first[0]) is not type(last[0]) and _parameters(*first) & _parameters(*last):
        # The forward pass comes to the head after all other units, as it must for the later modules of a unit.
        return [first + last, *units[1:-1]]
    return units


def owned_alone(model: nn.Module, units: Sequence[Unit]) -> dict[int, int]:
    """Return ``id(parameter) -> number of its unit`` for all parameters that only one unit holds.

    Shared parameters, and those outside units, are needed longer than one unit computes.
    """
    numbers = {id(module): number for number, unit in enumerate(units) for module in unit}
    holders: dict[int, set[int | None]] = {}
    places: dict[str, int | None] = {}
    # by place: a module may be inside a unit and outside of it (the embedding of multi-token prediction)
    for name, module in model.named_modules(remove_duplicate=False):
        places[name] = numbers.get(id(module), places.get(name.rpartition(".")[0]))
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), set()).add(places[name])
    # A parameter of two units would be gathered and freed by each without regard to the other.
    alone = {key: next(iter(numbers)) for key, numbers in holders.items() if len(numbers) == 1}
    return {key: number for key, number in alone.items() if number is not None}


def check_units(units: Sequence[Unit]) -> None:
    """Refuse what would call several units in one.

    Raises:
        ConfigurationError: groups of layers are recomputed.
    """
    for module in (module for unit in units for module in unit):
        if isinstance(module.__dict__.get("forward"), Member):
            raise ConfigurationError(
                "recompute.num_layers is larger than 1 with method 'uniform', which runs several layers as one, but "
                "each layer is gathered alone where gradients or parameters are sharded. Set recompute.num_layers=1, "
                "or method='block'."
            )


def _edge(model: nn.Module, name: str) -> Unit:
    module = getattr(model, name, None)
    if isinstance(module, nn.Module) and any(module.children()) and _parameters(module):
        return (module,)
    return ()


def _parameters(*modules: nn.Module) -> set[int]:
    return {id(parameter) for module in modules for parameter in module.parameters()}


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, CONTAINERS):
        children = list(module.children())
        # Several modules of one class, each with parts of its own: this is what a list of layers looks like.
        if len(children) > 1 and len({type(child) for child in children}) == 1 and any(children[0].children()):
            for child in children:
                yield from _called(child)
            return
    for child in module.children():
        yield from _repeated(child)


def _called(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield a layer. Of one that is a list of its parts, which nobody calls, yield the parts that have weights."""
    if not isinstance(layer, LISTS):
        yield layer
        return
    for part in layer.children():
        if any(True for _ in part.parameters()):
            yield from _called(part)


def _of_classes(module: nn.Module, classes: Sequence[str | type]) -> Iterator[nn.Module]:
    for child in module.children():
        if any(_has_class(child, wanted) for wanted in classes):
            yield child
        # Outermost matches only: a unit inside a unit would be gathered twice.
        else:
            yield from _of_classes(child, classes)


def _has_class(module: nn.Module, wanted: str | type) -> bool:
    """Whether a module is of a class, or of one with this name."""
    if isinstance(wanted, str):
        return any(kind.__name__ == wanted for kind in type(module).__mro__)
    return isinstance(module, wanted)
