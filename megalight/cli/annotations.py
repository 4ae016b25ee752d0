"""What an argument accepts, as far as its annotation in a source file says."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

import yaml

from megalight.cli.sources import DEPTH, ClassSource, Module, lookup

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
