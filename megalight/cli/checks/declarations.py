"""Defaults, arguments and methods of classes, as their source declares them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from megalight.cli.signatures import members
from megalight.cli.sources import DEPTH, ClassSource


def default_of(source: ClassSource, name: str) -> ast.expr | None:
    """Return the default of an argument; None if there is none."""
    for node in source.node.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return dict(arguments_of(node.args)).get(name)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return node.value
    return next((found for base in source.bases() if base and (found := default_of(base, name)) is not None), None)


def arguments_of(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the arguments of a function with their defaults."""
    named = [*arguments.posonlyargs, *arguments.args]
    # Defaults belong to the last arguments.
    defaults = [*[None] * (len(named) - len(arguments.defaults)), *arguments.defaults]
    yield from zip((each.arg for each in named), defaults, strict=True)
    yield from zip((each.arg for each in arguments.kwonlyargs), arguments.kw_defaults, strict=True)


def positional(source: ClassSource) -> list[str]:
    """Return the arguments of a class in their order, as far as the source says."""
    found = method_of(source, "__init__")
    if found is not None:
        arguments = found[1].args
        return [each.arg for each in (*arguments.posonlyargs, *arguments.args)][1:]
    # Fields of bases come first, unless they have to be named.
    above = any(base is None or members(base) for base in source.bases())
    return [] if above or not source.is_dataclass else [*(members(source) or ())]


def method_of(source: ClassSource, name: str, depth: int = DEPTH) -> tuple[ClassSource, ast.FunctionDef] | None:
    """Return a method of a class, and the class that defines it."""
    for node in source.node.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return (source, node) if not node.decorator_list else None
    above = [base for base in source.bases() if base is not None] if depth else []
    return next((found for base in above if (found := method_of(base, name, depth - 1)) is not None), None)
