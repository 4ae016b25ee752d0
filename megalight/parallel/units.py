"""Find the units of a model: the modules whose parameters are sharded and gathered together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from megalight.errors import ConfigurationError
from megalight.parallel.layers import layers_of
from megalight.parallel.recompute.group import Member

CONTAINERS = nn.ModuleList | nn.ModuleDict | nn.Sequential


def units_of(model: nn.Module, classes: Sequence[str | type] = ()) -> list[nn.Module]:
    """Return the units of a model in the order in which it registers them. No unit contains another.

    Args:
        classes: classes of units, or their names. Empty: the layers of the model, or the members of every list of at
            least two modules of one class that have modules of their own.

    Raises:
        ConfigurationError: no module is of a given class.
    """
    if not classes:
        return list(layers_of(model).values()) or list(_repeated(model))
    found = list(_of_classes(model, classes))
    for wanted in classes:
        if not any(_is_a(unit, wanted) for unit in found):
            name = wanted if isinstance(wanted, str) else wanted.__name__
            kinds = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
            raise ConfigurationError(
                f"data_parallel.units names {name!r}, and no outermost module of {type(model).__name__} is one; it has "
                f"{kinds}. Name the class of its layers."
            )
    return found


def owned_alone(model: nn.Module, units: Sequence[nn.Module]) -> dict[int, int]:
    """Return ``id(parameter) -> number of its unit`` for all parameters that only one unit holds.

    Shared parameters, and those outside units, are needed longer than one unit computes.
    """
    inside = {id(part): number for number, unit in enumerate(units) for part in unit.modules()}
    holders: dict[int, set[int | None]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), set()).add(inside.get(id(module)))
    alone = {key: next(iter(numbers)) for key, numbers in holders.items() if len(numbers) == 1}
    return {key: number for key, number in alone.items() if number is not None}


def check_units(units: Sequence[nn.Module]) -> None:
    """Refuse what would call several units in one.

    Raises:
        ConfigurationError: groups of layers are recomputed.
    """
    for unit in units:
        if isinstance(unit.__dict__.get("forward"), Member):
            raise ConfigurationError(
                "recompute.num_layers is larger than 1 with method 'uniform', which runs several layers as one, but "
                "each layer is gathered alone where gradients or parameters are sharded. Set recompute.num_layers=1, "
                "or method='block'."
            )


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, CONTAINERS):
        children = list(module.children())
        if len(children) > 1 and len({type(child) for child in children}) == 1 and any(children[0].children()):
            yield from children
            return
    for child in module.children():
        yield from _repeated(child)


def _of_classes(module: nn.Module, classes: Sequence[str | type]) -> Iterator[nn.Module]:
    for child in module.children():
        if any(_is_a(child, wanted) for wanted in classes):
            yield child
        else:
            yield from _of_classes(child, classes)


def _is_a(module: nn.Module, wanted: str | type) -> bool:
    if isinstance(wanted, str):
        return any(kind.__name__ == wanted for kind in type(module).__mro__)
    return isinstance(module, wanted)
