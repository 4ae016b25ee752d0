"""Classes and other definitions in source files, found through imports. No module is loaded: it takes milliseconds."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEPTH = 12
"""Imports that are followed from one name. Longer chains, and circles, are unknown."""


@dataclass(frozen=True)
class Module:
    """A source file.

    Attributes:
        name: its import path.
        path: the file.
    """

    name: str
    path: Path

    @functools.cached_property
    def names(self) -> dict[str, ast.stmt]:
        """What the file defines or imports at its top level: name -> statement.

        A name that is defined twice, in different ways, is there with a statement that says nothing. A file that is
        not Python holds ``*`` alone: it may hold any name, and only an import shows which.
        """
        try:
            state = self.path.stat()
            # With time and size of the file: another command of this process may find it edited.
            return _names(self.path, (state.st_mtime_ns, state.st_size))
        except OSError:
            return {"*": ast.Pass()}


@dataclass(frozen=True)
class ClassSource:
    """A class, where its source is."""

    module: Module
    node: ast.ClassDef

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.node.name

    @property
    def doc(self) -> str:
        """The docstring of the class, and that of its constructor, where some libraries describe the arguments."""
        nodes: list[ast.ClassDef | ast.FunctionDef] = [self.node]
        nodes += [node for node in self.node.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        return "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring."""
        return " ".join(self.doc.partition("\n\n")[0].split())

    @property
    def is_dataclass(self) -> bool:
        """Whether the class is decorated with ``@dataclass``."""
        # By the last word: a decorator may be called, and be named with its module.
        heads = [each.func if isinstance(each, ast.Call) else each for each in self.node.decorator_list]
        return any(ast.unparse(head).rpartition(".")[2] == "dataclass" for head in heads)

    def bases(self) -> Iterator[ClassSource | None]:
        """Yield the base classes; None for one that cannot be found."""
        for base in self.node.bases:
            # These add no arguments, and are not in files that could be read.
            if ast.unparse(base).partition("[")[0].rpartition(".")[2] not in ("object", "ABC", "Generic", "Protocol"):
                yield class_of(self.module, ast.unparse(base))


def find_class(path: str, extra: tuple[str, ...] = ()) -> ClassSource | None:
    """Return the class of an import path, or None.

    Args:
        path: ``package.module.Class``; or a bare name, which is looked up in ``extra``.
        extra: import paths of modules.
    """
    if "." not in path:
        return next((found for module in extra if (found := find_class(f"{module}.{path}"))), None)
    name, _, attribute = path.rpartition(".")
    module = find_module(name)
    return None if module is None else class_of(module, attribute)


@functools.cache
def find_module(name: str) -> Module | None:
    """Return the source of a module, or None."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    # A module is found by its path below the package. Importing the package to ask it would take seconds.
    path = Path(spec.origin)
    for part in rest:
        if path.name != "__init__.py":
            return None
        folder = path.parent / part
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if not path.is_file():
            return None
    return Module(name, path)


def class_of(module: Module, name: str, depth: int = DEPTH) -> ClassSource | None:
    """Return the class that a name means in a module, through imports; None if it is no class, or unknown."""
    found = lookup(module, name, depth)
    return ClassSource(found[0], found[1]) if found is not None and isinstance(found[1], ast.ClassDef) else None


def lookup(module: Module, name: str, depth: int = DEPTH) -> tuple[Module, ast.stmt] | None:
    """Find the statement that defines a name, through imports."""
    head, _, rest = name.partition(".")
    node = module.names.get(head)
    if depth == 0:
        return None
    if node is None:  # packages of models import their ``module`` only when somebody asks for the class
        below = find_module(f"{module.name}.module") if "__getattr__" in module.names and not rest else None
        return None if below is None else lookup(below, name, depth - 1)
    if isinstance(node, ast.Import):
        alias = next(each for each in node.names if (each.asname or each.name) == head)
        # Without `as`, the name stands for the first part of the path, so the rest must follow it.
        full = f"{alias.name}.{rest}"
    elif isinstance(node, ast.ImportFrom):
        alias = next(each for each in node.names if (each.asname or each.name) == head)
        package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
        # Each further dot goes one package up.
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        start = f"{package}.{node.module or ''}".rstrip(".") if node.level else node.module or ""
        full = f"{start}.{alias.name}" + (f".{rest}" if rest else "")
    else:
        return None if rest else (module, node)
    where, _, last = full.rpartition(".")
    target = find_module(where)
    return None if target is None else lookup(target, last, depth - 1)


@functools.cache
def _names(path: Path, state: tuple[int, int]) -> dict[str, ast.stmt]:
    """Read a file once for all commands of this process, and again when its ``state`` (time and size) is another."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return {"*": ast.Pass()}
    found: dict[str, ast.stmt] = {}
    for node in statements(body):
        for name in bound(node):
            # The same import under `if` and `else` is no contradiction.
            same = name not in found or ast.dump(found[name]) == ast.dump(node)
            found[name] = node if same else ast.Pass()
    return found


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, also those under ``if``, ``try``, ``with`` and loops."""
    for node in body:
        yield node
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for name in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement defines or imports."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.ImportFrom | ast.Import):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
