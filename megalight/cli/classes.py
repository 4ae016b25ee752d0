"""Classes by name, and their constructor arguments, from what is imported.

:mod:`megalight.cli.signatures` reads the same from source files, without imports.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import typing
from collections.abc import Iterator
from typing import Any


def find_class(name: str) -> type | None:
    """Return the class of an import path or, for a bare name, the imported Lightning subclass with this name."""
    if "." in name:
        module, _, attribute = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), attribute, None)
        except (ImportError, ValueError):  # ".2" has an empty name of a module
            return None
        return found if isinstance(found, type) else None
    known = (cls for base in _bases() for cls in subclasses(base))
    return next((cls for cls in known if cls.__name__ == name), None)


def subclasses(base: type) -> Iterator[type]:
    """Yield all imported subclasses, at any depth."""
    below: list[type] = base.__subclasses__()
    for cls in below:
        yield cls
        yield from subclasses(cls)


def members(cls: type) -> dict[str, Any]:
    """Return constructor argument -> annotation. ``**kwargs`` adds the arguments of base classes."""
    if dataclasses.is_dataclass(cls):
        hints = _hints(cls)
        return {item.name: hints.get(item.name) for item in dataclasses.fields(cls) if item.init}
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        init = vars(base)["__init__"]
        parameters = inspect.signature(init).parameters
        hints = _hints(init)
        for name, parameter in list(parameters.items())[1:]:
            # Base classes come later in the order of `__mro__`, and must not replace an
            # argument that was overridden.
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                found.setdefault(name, hints.get(name))
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return found


def class_in(annotation: Any) -> type | None:
    """Return the configurable class in an annotation: the annotation itself, or the first class of a union."""
    candidates = typing.get_args(annotation) or (annotation,)
    return next((item for item in candidates if isinstance(item, type) and item.__module__ != "builtins"), None)


def _hints(item: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(item)
    except (NameError, TypeError):  # annotations under TYPE_CHECKING, C functions
        return {}


def _bases() -> list[type]:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.plugins import CheckpointIO, Precision
    from lightning.pytorch.strategies import Strategy

    return [pl.LightningModule, pl.LightningDataModule, pl.Callback, Strategy, Logger, Precision, CheckpointIO]
