"""What constructors refuse, read from their source: nothing is imported, so it takes milliseconds.

A constructor that begins with ``if size < 1: raise ConfigurationError(...)`` says in its source which values it
refuses. Its statements are followed with the values of a command (:mod:`megalight.cli.checks.walk`).
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from typing import Any

from megalight.cli.annotations import Annotation
from megalight.cli.checks.declarations import default_of
from megalight.cli.checks.expressions import UNKNOWN
from megalight.cli.checks.walk import KNOWN, Walk
from megalight.cli.signatures import members
from megalight.cli.sources import ClassSource


def check(values: Mapping[str, Any], classes: Mapping[str, ClassSource | None]) -> None:
    """Refuse values that the constructor of a class of ours refuses.

    Args:
        values: dotted key -> value, as YAML reads it.
        classes: the classes that fill keys.

    Raises:
        MegalightError: what the constructor raises.
    """
    for key, source in classes.items():
        # A rank that somebody started: the command was checked before, or all ranks would say the same.
        if source is not None and "LOCAL_RANK" not in os.environ:
            _check_class(key, source, values, defaults=True)


def _check_class(key: str, source: ClassSource, values: Mapping[str, Any], defaults: bool) -> None:
    """Check a class and the configurations in its arguments, those first, as the parser makes them."""
    arguments = members(source) if source.module.name.startswith(KNOWN) else None
    if arguments is None:
        return
    given: dict[str, Any] = {}
    for name, accepted in arguments.items():
        inner = f"{key}.{name}"
        below = [each for each in values if each.startswith(f"{inner}.")]
        if below and inner not in values and accepted.source is not None and accepted.source.is_dataclass:
            # A default that is no plain call says something about the fields that are not given.
            _check_class(inner, accepted.source, values, defaults=_is_plain(default_of(source, name)))
        value = _value(inner, values, accepted)
        if value is not UNKNOWN or below:
            given[name] = value
        elif not defaults:
            given[name] = UNKNOWN
    Walk(source.module).construct(source, given)


def _value(key: str, values: Mapping[str, Any], accepted: Annotation) -> Any:
    """Return the value of an argument as the constructor gets it."""
    below = {each[len(key) + 1 :]: value for each, value in values.items() if each.startswith(f"{key}.")}
    if key not in values:
        # A list of plain values is flat here: ``betas.0``, ``betas.1``.
        plain = below and [*below] == [str(n) for n in range(len(below))] and accepted.source is None
        return tuple(below.values()) if plain else UNKNOWN
    value = values[key]
    if below or accepted.source is not None:
        return UNKNOWN
    if value is None or value in accepted.choices:
        return value
    number = type(value) in (int, float)
    if number and int in accepted.scalars and value == value // 1:
        return int(value)
    if number and float in accepted.scalars:
        return float(value)
    return value if type(value) in accepted.scalars else UNKNOWN


def _is_plain(default: ast.expr | None) -> bool:
    """Whether fields that are not given have the defaults of their class."""
    none = default is None or (isinstance(default, ast.Constant) and default.value is None)
    return none or (isinstance(default, ast.Call) and not default.args and not default.keywords)
