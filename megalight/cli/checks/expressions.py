"""Values of expressions in source code, as far as they are known. Nothing is imported or evaluated by Python itself.

Constants, variables with known values, comparisons, arithmetic and a few functions have values. Any other expression is
unknown.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megalight import errors
from megalight.cli.sources import DEPTH, ClassSource, Module, lookup
from megalight.errors import MegalightError

COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
COMPUTE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
SIGNS: dict[type, Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "bool": bool,
    "len": len,
    "list": list,
    "max": max,
    "min": min,
    "repr": repr,
    "sorted": sorted,
    "str": str,
    "tuple": tuple,
    "math.isfinite": math.isfinite,
    "nearest": errors.nearest,
}
"""Functions that are called with known values, by the names that they have in our files."""

PURE = (*FUNCTIONS, "getattr", "isinstance", "get_args", "super().__init__", "super().__post_init__")
"""What changes none of the values that are known."""

KINDS = {"int": int, "float": float, "bool": bool, "str": str}


class Unknown(Exception):
    """A value depends on something that the source does not contain."""


UNKNOWN: Any = object()


@dataclass
class Expressions:
    """Finds the values of expressions in one function.

    Attributes:
        module: the file of the function.
        names: values of its arguments and variables; ``self.size`` is the attribute of that name.
        depth: calls and constants of other files that may still be followed.
    """

    module: Module
    names: dict[str, Any] = field(default_factory=dict)
    depth: int = DEPTH

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression.

        Raises:
            Unknown: the source does not say.
        """
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() | ast.Attribute():
                return self._named(node)
            case ast.BoolOp():
                return self._either(node)
            case ast.UnaryOp(op=op) if type(op) in SIGNS:
                return SIGNS[type(op)](self.value(node.operand))
            case ast.BinOp(op=op) if type(op) in COMPUTE:
                return COMPUTE[type(op)](self.value(node.left), self.value(node.right))
            case ast.Compare():
                return self._compare(node)
            case ast.IfExp():
                return self.value(node.body if self.value(node.test) else node.orelse)
            case ast.Tuple() | ast.List() | ast.Set():
                return tuple(self.value(each) for each in node.elts)
            case ast.JoinedStr():
                return "".join(str(self.value(each)) for each in node.values)
            case ast.FormattedValue():
                return self._formatted(node)
            case ast.Subscript():
                return self._items(node.value)[self.value(node.slice)]
            case ast.NamedExpr():
                self.names[node.target.id] = value = self.value(node.value)
                return value
            case ast.Call():
                return self._call(node)
        raise Unknown

    def maybe(self, node: ast.expr) -> Any:
        """Return the value of an expression, or ``UNKNOWN``."""
        try:
            return self.value(node)
        except MegalightError:
            raise
        except (Unknown, ArithmeticError, TypeError, ValueError, LookupError, RecursionError):
            return UNKNOWN

    def _named(self, node: ast.Name | ast.Attribute) -> Any:
        name = ast.unparse(node)
        if name in self.names:
            if self.names[name] is UNKNOWN:
                raise Unknown
            return self.names[name]
        found = lookup(self.module, name)
        if found is not None and isinstance(found[1], ast.ClassDef):
            return ClassSource(found[0], found[1])
        if found is None or not self.depth or not isinstance(found[1], ast.Assign | ast.AnnAssign):
            raise Unknown
        constant, inner = found[1].value, type(self)(found[0], depth=self.depth - 1)
        if isinstance(constant, ast.Dict) and _is_declared(found[1], "Mapping"):
            # What loops and ``in`` see of it. Nobody adds to what is declared as a mapping.
            return tuple(inner.value(key) for key in constant.keys if key is not None)
        # Lists and other dicts may be filled elsewhere.
        if isinstance(constant, ast.Constant | ast.Tuple | ast.Attribute | ast.Name):
            return inner.value(constant)
        raise Unknown

    def _either(self, node: ast.BoolOp) -> Any:
        value: Any = None
        for each in node.values:
            value = self.value(each)
            if bool(value) == isinstance(node.op, ast.Or):
                break
        return value

    def _compare(self, node: ast.Compare) -> bool:
        left = self.value(node.left)
        for op, right in zip(node.ops, map(self.value, node.comparators), strict=True):
            if isinstance(left, ClassSource) or isinstance(right, ClassSource):
                raise Unknown
            if type(op) not in COMPARE or not COMPARE[type(op)](left, right):
                return False
            left = right
        return True

    def _formatted(self, node: ast.FormattedValue) -> str:
        if isinstance(value := self.value(node.value), ClassSource):
            raise Unknown
        shown = {ord("r"): repr(value), ord("s"): str(value)}.get(node.conversion, value)
        return format(shown, "" if node.format_spec is None else str(self.value(node.format_spec)))

    def _call(self, node: ast.Call) -> Any:
        name = ast.unparse(node.func)
        if name == "isinstance" and len(node.args) == 2:
            return self._isinstance(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "join" and len(node.args) == 1:
            return self._join(self.value(node.func.value), node.args[0])
        if name == "get_args" and len(node.args) == 1:
            return self._choices(node.args[0])
        if name == "getattr" and len(node.args) == 2:
            return self._attribute(node)
        return self._function(node, name)

    def _function(self, node: ast.Call, name: str) -> Any:
        """Return the value of a call of a function that has a name."""
        if name not in FUNCTIONS or node.keywords:
            raise Unknown
        return FUNCTIONS[name](*map(self.value, node.args))

    def _isinstance(self, node: ast.Call) -> bool:
        kinds = [each.strip() for each in ast.unparse(node.args[1]).split("|")]
        if not all(each in KINDS for each in kinds):
            raise Unknown
        return isinstance(self.value(node.args[0]), tuple(KINDS[each] for each in kinds))

    def _join(self, mark: str, node: ast.expr) -> str:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "map" and len(node.args) == 2:
            how = FUNCTIONS.get(ast.unparse(node.args[0]))
            if how is None:
                raise Unknown
            return mark.join(map(how, self._items(node.args[1])))
        return mark.join(self._items(node))

    def _items(self, node: ast.expr) -> Sequence[Any]:
        found = self.value(node)
        if not isinstance(found, tuple | list):
            raise Unknown
        return found

    def _choices(self, node: ast.expr) -> tuple[Any, ...]:
        """Return the values of a ``Literal`` that has a name."""
        found = lookup(self.module, ast.unparse(node))
        value = found[1].value if found is not None and isinstance(found[1], ast.Assign | ast.AnnAssign) else None
        if not isinstance(value, ast.Subscript) or ast.unparse(value.value).rpartition(".")[2] != "Literal":
            raise Unknown
        parts = value.slice.elts if isinstance(value.slice, ast.Tuple) else [value.slice]
        return tuple(self.value(part) for part in parts)

    def _attribute(self, node: ast.Call) -> Any:
        """Return the attribute of ``self`` whose name is in a variable."""
        found = self.names.get(f"{ast.unparse(node.args[0])}.{self.value(node.args[1])}", UNKNOWN)
        if found is UNKNOWN:
            raise Unknown
        return found


def _is_declared(node: ast.stmt, kind: str) -> bool:
    return isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith(f"{kind}[")
