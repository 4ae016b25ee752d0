"""Attributes of foreign modules that count split things."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from megalight.errors import LayoutError
from megalight.parallel.degrees import replicas_of
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register


@register
@dataclass(frozen=True)
class Attributes(Style):
    """Changes attributes that count things (head counts in foreign models) to the numbers of one rank.

    Attributes:
        divide: names of counts that are divided by ``tp``.
        per_unit: name of a ratio -> number of units. If there are fewer units than ``tp``, the ratio is divided by the
            number of ranks that share a unit (for example, query heads per KV head).
    """

    divide: tuple[str, ...] = ()
    per_unit: Mapping[str, int] = field(default_factory=dict)

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, and change its attributes."""
        # Its own parameters, if any, stay whole: those that the counts describe belong to the layers inside.
        splitter.keep(name, module)
        tp = splitter.shared.mesh.tp
        for attribute in self.divide:
            _divide(name, module, attribute, tp)
        # With replicated units, a rank's queries per key head shrink by the number of ranks that share the key head.
        for attribute, units in self.per_unit.items():
            _divide(name, module, attribute, replicas_of(units, tp, f"{name}.{attribute}"))


def _divide(name: str, module: nn.Module, attribute: str, by: int) -> None:
    value = getattr(module, attribute, None)
    if not isinstance(value, int) or value % by:
        raise LayoutError(f"{name}.{attribute} is {value!r}; it must be an integer that {by} divides. Lower tp.")
    setattr(module, attribute, value // by)
