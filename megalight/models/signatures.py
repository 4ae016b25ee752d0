"""Check that methods which a user's module overrides take the arguments that they are called with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType

from megalight.errors import ConfigurationError

GIVEN = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
"""Kinds of parameters that callers give by place."""


def check_signatures(module: object, known: type) -> None:
    """Refuse a module that overrides a public method of Megalight with one that cannot be called like it.

    Args:
        module: an instance of a user's class, or of ours.
        known: a base of it whose methods others call as they are declared there: Lightning looks at what a step takes.

    Raises:
        ConfigurationError: the message says what the method must take.
    """
    for name, declared in _declared(type(module)).items():
        if hasattr(known, name):
            continue
        own = getattr(module, name)
        if getattr(own, "__func__", None) is not declared:  # to ask for a signature takes longer than all the rest
            _check(type(module).__name__, name, own, inspect.signature(declared))


def _declared(kind: type) -> dict[str, FunctionType]:
    """Return the public methods of our own classes among the bases, each from the most derived one."""
    found: dict[str, FunctionType] = {}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "megalight":
            for name, method in vars(base).items():
                if isinstance(method, FunctionType) and not name.startswith("_"):
                    found.setdefault(name, method)
    return found


def _check(kind: str, name: str, own: object, declared: inspect.Signature) -> None:
    write = f"write def {name}{_plain(declared)}"
    if not callable(own):
        raise ConfigurationError(f"{kind}.{name} is a {type(own).__name__}, and it is called as a method; {write}.")
    try:
        takes = inspect.signature(own)
    except ValueError:  # a function in C does not say
        return
    for given in _calls(declared):
        try:
            takes.bind(*given)
        except TypeError as error:
            raise ConfigurationError(
                f"{kind}.{name}{_plain(takes)} is called as {name}({', '.join(given)}), which it does not take "
                f"({error}); {write}."
            ) from error


def _calls(declared: inspect.Signature) -> Iterator[list[str]]:
    """Yield what the method may be given: all of its arguments, and those without a default."""
    taken = [parameter for parameter in list(declared.parameters.values())[1:] if parameter.kind in GIVEN]
    yield [parameter.name for parameter in taken]
    yield [parameter.name for parameter in taken if parameter.default is inspect.Parameter.empty]


def _plain(signature: inspect.Signature) -> str:
    """Return a signature without types."""
    empty = inspect.Parameter.empty
    plain = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
