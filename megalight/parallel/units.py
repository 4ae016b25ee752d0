"""Find the units of a model: the modules whose parameters are sharded and gathered together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from megalight.errors import ConfigurationError
from megalight.parallel.layers import depth_layers_of, layers_of, tower_layers_of
from megalight.parallel.recompute.regions import Member

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
        if not any(is_a(unit, wanted) for unit in found):
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
        if any(is_a(child, wanted) for wanted in classes):
            yield child
        # Outermost matches only: a unit inside a unit would be gathered twice.
        else:
            yield from _of_classes(child, classes)


def is_a(module: nn.Module, wanted: str | type) -> bool:
    """Whether a module is of a class, or of one with this name."""
    if isinstance(wanted, str):
        return any(kind.__name__ == wanted for kind in type(module).__mro__)
    return isinstance(module, wanted)
