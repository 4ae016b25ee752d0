"""The arguments of a class, read from its source file. Nothing is imported, so it takes milliseconds.

What the source does not say plainly is unknown (None), and the real parser decides about it later.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from megalight.cli.annotations import UNKNOWN, Annotation, annotation
from megalight.cli.sources import DEPTH, ClassSource, Module, bound, lookup, statements

KEEP_ARGUMENTS = ("dataclass", "final", "override", "ABCMeta", "register", "_defaults_from_env_vars")
"""Decorators and metaclasses that leave the arguments of a class as they are."""

UNCHANGED = ("megalight.", "lightning.", "torch.")
"""Begins names of modules that nobody edits between two commands of one process."""


@dataclass(frozen=True)
class SourceArgument:
    """An argument as its source has it: text for readers.

    Attributes:
        annotation: its annotation.
        default: its default value; empty if there is none, or if a function makes it.
    """

    annotation: str = ""
    default: str = ""


def members(source: ClassSource) -> dict[str, Annotation] | None:
    """Return the arguments of a class's constructor, or None if the source does not list them all.

    ``**kwargs`` adds the arguments of the base classes.
    """
    return (_read_once if source.module.name.startswith(UNCHANGED) else _members)(source, DEPTH)


def _members(source: ClassSource, depth: int) -> dict[str, Annotation] | None:
    if depth == 0:
        # A circle of base classes, or too deep to follow.
        return None
    inits = [node for node in statements(source.node.body) if "__init__" in bound(node)]
    init = inits[0] if inits else None
    # A class with several constructors, or one that a decorator may replace, has no arguments that can be read.
    if len(inits) > 1 or _is_changed(source.node) or (init is not None and not isinstance(init, ast.FunctionDef)):
        return None
    found: dict[str, Annotation] = {}
    if init is not None:
        if _is_changed(init):
            return None
        arguments = [*init.args.posonlyargs, *init.args.args, *init.args.kwonlyargs][1:]
        # Arguments after `self`, in their order.
        found = {each.arg: annotation(source.module, each.annotation) for each in arguments}
        if init.args.kwarg is None:
            return found
        if init.args.kwarg.annotation is not None and "Unpack" in ast.unparse(init.args.kwarg.annotation):
            return None
        if _go_elsewhere(init, init.args.kwarg.arg):
            return None
        found = {**dict.fromkeys(_taken(init, init.args.kwarg.arg), UNKNOWN), **found}
    elif source.is_dataclass:
        fields = [node for node in source.node.body if isinstance(node, ast.AnnAssign) and _is_argument(node)]
        found = {
            node.target.id: annotation(source.module, node.annotation)
            for node in fields
            if isinstance(node.target, ast.Name)
        }
    inherited: dict[str, Annotation] = {}
    for base in source.bases():
        above = None if base is None else _members(base, depth - 1)
        if above is None:
            # One base that cannot be read may take anything.
            return None
        # Nearer bases win over those above them.
        inherited = {**above, **inherited}
    if init is not None and not inherited:  # nobody above takes any of ``**kwargs``
        return None
    return {**inherited, **found}


_read_once = functools.cache(_members)


def written(source: ClassSource) -> dict[str, SourceArgument]:
    """Return the arguments that a class and its bases declare, as they are written. Nearer classes win."""
    found: dict[str, SourceArgument] = {}
    for base in source.bases():
        # The first base wins over the next, as it does for Python.
        found = {**({} if base is None else written(base)), **found}
    for node in source.node.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            named = [*node.args.posonlyargs, *node.args.args]
            # Defaults belong to the last arguments.
            values = [*[None] * (len(named) - len(node.args.defaults)), *node.args.defaults, *node.args.kw_defaults]
            for argument, value in zip([*named, *node.args.kwonlyargs], values, strict=True):
                found[argument.arg] = SourceArgument(_text(argument.annotation), _default(source.module, value))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and source.is_dataclass:
            found[node.target.id] = SourceArgument(_text(node.annotation), _default(source.module, node.value))
    return found


def _is_argument(node: ast.AnnAssign) -> bool:
    """Whether a field of a dataclass is an argument of its constructor."""
    if ast.unparse(node.annotation).partition("[")[0].rpartition(".")[2] == "ClassVar":
        return False
    given = node.value.keywords if isinstance(node.value, ast.Call) else []
    return not any(each.arg == "init" and ast.unparse(each.value) == "False" for each in given)


def _default(module: Module, node: ast.expr | None) -> str:
    """Return a default value. A call makes one, which cannot be shown; a name stands for a constant of the module."""
    if isinstance(node, ast.Call):
        return ""
    found = lookup(module, node.id, DEPTH) if isinstance(node, ast.Name) else None
    return _text(getattr(found[1], "value", node) if found is not None else node)


def _text(node: ast.expr | None) -> str:
    # Words are shown without their quotes, as they are typed.
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value:
        return node.value
    return "" if node is None else ast.unparse(node)


def _is_changed(node: ast.ClassDef | ast.FunctionDef) -> bool:
    """Whether a decorator or a metaclass may change the arguments."""
    heads = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    metas = [each.value for each in node.keywords if each.arg == "metaclass"] if isinstance(node, ast.ClassDef) else []
    return not {ast.unparse(each).rpartition(".")[2] for each in (*heads, *metas)} <= {*KEEP_ARGUMENTS}


def _taken(init: ast.FunctionDef, name: str) -> Iterator[str]:
    """Yield the arguments that a constructor takes out of ``**kwargs``: those in ``kwargs.pop("size", 3)``."""
    for node in ast.walk(init):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (f"{name}.pop", f"{name}.get") and node.args:
            key = node.args[0]
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value


def _go_elsewhere(init: ast.FunctionDef, name: str) -> bool:
    """Whether ``**kwargs`` are kept, or passed on to something else than the constructor of the base class."""
    for node in ast.walk(init):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Name) and node.value.id == name:
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func) != "super().__init__":
            passed = (each.value for each in node.keywords if each.arg is None)
            if any(isinstance(value, ast.Name) and value.id == name for value in passed):
                return True
    return False
