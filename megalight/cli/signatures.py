"""Classes in source files, found through imports, their arguments, and what these accept.

No module is imported, so it takes milliseconds.

What the source does not say plainly is unknown (None), and the real parser decides about it later.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

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
            name = ast.unparse(base).partition("[")[0]
            # These add no arguments, and are not in files that could be read.
            if name.rpartition(".")[2] not in ("object", "ABC", "Generic", "Protocol"):
                yield class_of(self.module, name)


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


SCALARS = {"int": int, "float": float, "bool": bool, "str": str}
EXPONENT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")


@dataclass(frozen=True)
class Annotation:
    """What an argument accepts, as far as the source says.

    Attributes:
        scalars: the plain types, a subset of int, float, bool and str.
        choices: the values of a ``Literal``.
        source: the class, if there is exactly one.
        complete: nothing else is accepted, except None if ``optional``.
        optional: None is accepted.
    """

    scalars: frozenset[type] = frozenset()
    choices: tuple[Any, ...] = ()
    source: ClassSource | None = None
    complete: bool = True
    optional: bool = False

    def __or__(self, other: Annotation) -> Annotation:
        """Return the union of both."""
        return Annotation(
            self.scalars | other.scalars,
            self.choices + other.choices,
            self.source or other.source,
            # Two classes: which of them is meant, the parser must find out.
            self.complete and other.complete and not (self.source and other.source),
            self.optional or other.optional,
        )


UNKNOWN = Annotation(complete=False)


def annotation(module: Module, node: ast.expr | None, depth: int = DEPTH) -> Annotation:
    """Return what an annotation in a module accepts."""
    # Aliases may name each other in a circle.
    if node is None or depth == 0:
        return UNKNOWN
    if isinstance(node, ast.Constant):
        if node.value is None:
            return Annotation(optional=True)
        # Annotations in quotes are code, too.
        try:
            inner = ast.parse(node.value, mode="eval").body if isinstance(node.value, str) else None
        except SyntaxError:
            return UNKNOWN
        return annotation(module, inner, depth - 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return annotation(module, node.left, depth) | annotation(module, node.right, depth)
    if isinstance(node, ast.Subscript):
        return _subscript(module, node, depth)
    text = ast.unparse(node)
    if text in SCALARS:
        return Annotation(frozenset({SCALARS[text]}))
    found = lookup(module, text, depth) if isinstance(node, ast.Name | ast.Attribute) else None
    if found is not None and isinstance(found[1], ast.ClassDef):
        return Annotation(source=ClassSource(*found))  # type: ignore[arg-type]  # narrowed above
    if found is not None and isinstance(found[1], ast.Assign | ast.AnnAssign):
        return annotation(found[0], found[1].value, depth - 1)
    return UNKNOWN


def _subscript(module: Module, node: ast.Subscript, depth: int) -> Annotation:
    head = ast.unparse(node.value).rpartition(".")[2]
    parts = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    if head == "Literal":
        values = [part.value if isinstance(part, ast.Constant) else UNKNOWN for part in parts]
        return UNKNOWN if UNKNOWN in values else Annotation(choices=tuple(values))
    if head not in ("Optional", "Union"):
        return UNKNOWN
    joined = Annotation(optional=head == "Optional")
    for part in parts:
        joined = joined | annotation(module, part, depth)
    return joined


def read_word(value: Any) -> Any:
    """Return the value that a word stands for: ``0x10`` is 16, ``no`` is False."""
    try:
        read = yaml.safe_load(value) if isinstance(value, str) else value
    except (ValueError, yaml.YAMLError):
        return value
    # YAML 1.1 reads 1e-5 as text, because it has no point; the parser reads a number.
    return float(read) if isinstance(read, str) and EXPONENT.fullmatch(read) else read


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
