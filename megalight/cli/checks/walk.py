"""Follow the statements of a function by its source, with values for its arguments. Nothing is imported.

What a function computes from values that are not known is unknown too, and nothing is concluded from it. So each error
that is raised here is one that the function itself raises.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megalight import errors
from megalight.cli.checks.declarations import arguments_of, default_of, method_of, positional
from megalight.cli.checks.expressions import FUNCTIONS, PURE, UNKNOWN, Expressions, Unknown
from megalight.cli.signatures import members
from megalight.cli.sources import ClassSource, class_of, lookup
from megalight.errors import MegalightError

KNOWN = ("megalight.", "lightning.")
"""What modules begin with whose constructors are followed: those whose habits are known."""


class _Ends(Exception):
    """A function returns, or goes on in a way that is unknown."""

    def __init__(self, value: Any = UNKNOWN) -> None:
        self.value = value


@dataclass
class Walk(Expressions):
    """Follows statements of one function, and the constructors, functions and methods that they call.

    Attributes:
        owner: the class that ``super()`` is relative to.
        kind: the class of ``self``.
        followed: calls whose effects are known.
    """

    owner: ClassSource | None = None
    kind: ClassSource | None = None
    followed: set[ast.Call] = field(default_factory=set)

    def construct(self, source: ClassSource, given: Mapping[str, Any]) -> None:
        """Follow the constructor of a class.

        Args:
            source: the class.
            given: values of arguments, or ``UNKNOWN``. Others have their defaults.

        Raises:
            MegalightError: the constructor raises it.
        """
        if self.depth == 0:
            return
        found = method_of(source, "__init__")
        if found is not None:
            owner, init = found
            inner = Walk(owner.module, {}, self.depth - 1, owner, source)
            inner.names = {name: inner._default(node, given.get(name, node)) for name, node in arguments_of(init.args)}
            inner.follow(init.body)
        elif source.is_dataclass and (found := method_of(source, "__post_init__")) is not None:
            owner, init = found
            inner = Walk(owner.module, {}, self.depth - 1, owner, source)
            for name in members(source) or ():
                default = default_of(source, name)
                inner.names[f"self.{name}"] = inner._default(default, given.get(name, default))
            inner.follow(init.body)

    def _default(self, default: ast.expr | None, value: Any) -> Any:
        if value is not default:
            return value
        return UNKNOWN if default is None else self.maybe(default)

    def follow(self, body: Sequence[ast.stmt]) -> Any:
        """Follow statements. Return what ``return`` gives, or ``UNKNOWN``."""
        try:
            for node in body:
                self._statement(node)
        except _Ends as end:
            return end.value
        return None

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.If):
            self._if(node)
        elif isinstance(node, ast.Raise):
            self._raise(node)
        elif isinstance(node, ast.For):
            self._for(node)
        elif isinstance(node, ast.Return):
            raise _Ends(None if node.value is None else self.maybe(node.value))
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            value = self.maybe(node.value)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            self._forget(node)
            for target in targets:
                if isinstance(target, ast.Name | ast.Attribute):
                    self.names[ast.unparse(target)] = value
        elif isinstance(node, ast.Expr):
            kept = self._kept(node.value)
            self.maybe(node.value)
            self._forget(node)
            self.names |= kept
        else:
            self._skip(node)

    def _kept(self, node: ast.expr) -> dict[str, Any]:
        """Return what ``object.__setattr__(self, name, value)`` sets, as frozen classes do."""
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__" and len(node.args) == 3:
            owner, name, value = node.args[0], self.maybe(node.args[1]), self.maybe(node.args[2])
            if isinstance(name, str):
                return {f"{ast.unparse(owner)}.{name}": value}
        return {}

    def _if(self, node: ast.If) -> None:
        test = self.maybe(node.test)
        if test is UNKNOWN:
            self._skip(node)
            return
        for each in node.body if test else node.orelse:
            self._statement(each)

    def _for(self, node: ast.For) -> None:
        targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
        rows = self._rows(node.iter, len(targets))
        if rows is None or node.orelse or _leaves(node):
            self._skip(node)
            return
        for row in rows:
            self.names |= {ast.unparse(target): part for target, part in zip(targets, row, strict=False)}
            for each in node.body:
                self._statement(each)

    def _rows(self, node: ast.expr, width: int) -> list[tuple[Any, ...]] | None:
        """Return what a loop goes through, or None. Single values may be unknown."""
        if isinstance(node, ast.Tuple | ast.List):
            each = [item.elts if width > 1 and isinstance(item, ast.Tuple) else [item] for item in node.elts]
            return [tuple(map(self.maybe, row)) for row in each]
        found = self.maybe(node)
        return [(item,) for item in found] if isinstance(found, tuple) and width == 1 else None

    def _raise(self, node: ast.Raise) -> NoReturn:
        # Whatever is raised, nothing after it runs.
        if isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name) and len(node.exc.args) == 1:
            error = self._error(node.exc.func.id)
            text = self.maybe(node.exc.args[0])
            if error is not None and isinstance(text, str):
                raise error(text)
        raise _Ends

    def _error(self, name: str) -> type[MegalightError] | None:
        """Return the class of an error that commands print without a traceback, or None."""
        source = class_of(self.module, name)
        if source is not None and source.name == "MisconfigurationException":
            return errors.ConfigurationError
        found = getattr(errors, name, None) if source is not None and source.module.name == errors.__name__ else None
        return found if isinstance(found, type) and issubclass(found, MegalightError) else None

    def _skip(self, node: ast.stmt) -> None:
        """Pass over a statement that may or may not do what it says."""
        if any(isinstance(each, ast.Return | ast.Match | ast.Global | ast.Nonlocal) for each in ast.walk(node)):
            raise _Ends
        self._forget(node)

    def _forget(self, node: ast.AST) -> None:
        """Forget what a piece of code may change."""
        for each in ast.walk(node):
            if isinstance(each, ast.Name | ast.Attribute) and not isinstance(each.ctx, ast.Load):
                self.names[ast.unparse(each)] = UNKNOWN
            elif isinstance(each, ast.FunctionDef | ast.ClassDef | ast.alias):
                self.names[each.asname or each.name if isinstance(each, ast.alias) else each.name] = UNKNOWN
            elif isinstance(each, ast.Call) and each not in self.followed and ast.unparse(each.func) not in PURE:
                if ast.unparse(each.func) == "object.__setattr__" and len(each.args) == 3:
                    name = self.maybe(each.args[1])
                    self._change("self") if name is UNKNOWN else self.names.update({f"self.{name}": UNKNOWN})
                    continue
                # A method, or a function that gets an object, may change it.
                touched = [each.func.value] if isinstance(each.func, ast.Attribute) else []
                for name in filter(lambda part: isinstance(part, ast.Name), [*touched, *each.args]):
                    self._change(ast.unparse(name))

    def _change(self, name: str) -> None:
        if name == "self":
            self.names.update({key: UNKNOWN for key in self.names if key.startswith("self.")})
        elif not isinstance(self.names.get(name), int | float | str | tuple | None):
            self.names[name] = UNKNOWN

    def _function(self, node: ast.Call, name: str) -> Any:
        if name in ("super().__init__", "super().__post_init__"):
            self._super(name.rpartition(".")[2], node)
            raise Unknown
        if name.startswith("self.") and name.count(".") == 1:
            return self._method(node, name.removeprefix("self."))
        called = self.names.get(name)
        found = (called.module, called.node) if isinstance(called, ClassSource) else lookup(self.module, name)
        plain = name in FUNCTIONS and found is not None and found[0].name == errors.__name__
        if found is None or plain or not found[0].name.startswith(KNOWN):
            return super()._function(node, name)
        if isinstance(found[1], ast.ClassDef):
            source = ClassSource(found[0], found[1])
            self.construct(source, self._bound(positional(source), node))
            raise Unknown
        if isinstance(found[1], ast.FunctionDef) and not found[1].decorator_list:
            return self._follow(node, Walk(found[0], depth=self.depth - 1), found[1])
        raise Unknown

    def _follow(self, node: ast.Call, inner: Walk, function: ast.FunctionDef) -> Any:
        """Follow a function that is called."""
        call = node
        self.followed.discard(call)  # in a loop, it may have been followed before
        if not self.depth:
            raise Unknown
        defaults = dict(arguments_of(function.args))
        defaults.pop("self", None)
        if function.args.vararg is not None and len(defaults) == len(node.keywords):
            inner.names[function.args.vararg.arg] = tuple(map(self.value, node.args))
            node = ast.Call(node.func, [], node.keywords)
        given = self._bound([*defaults], node)
        inner.names |= {key: inner._default(default, given.get(key, default)) for key, default in defaults.items()}
        value = inner.follow(function.body)
        if value is UNKNOWN:
            raise Unknown
        self.followed.add(call)
        return value

    def _method(self, node: ast.Call, name: str) -> Any:
        """Follow a method of this object. What it does to the object's attributes is kept."""
        found = None if self.kind is None else method_of(self.kind, name)
        if found is None:
            raise Unknown
        inner = Walk(found[0].module, self._fields(), self.depth - 1, found[0], self.kind)
        value = self._follow(node, inner, found[1])
        self.names |= inner._fields()
        return value

    def _fields(self) -> dict[str, Any]:
        return {key: value for key, value in self.names.items() if key.startswith("self.")}

    def _bound(self, names: Sequence[str], node: ast.Call) -> dict[str, Any]:
        """Return the values of a call's arguments.

        Raises:
            Unknown: not all arguments without a name can be given to one of ``names``.
        """
        if len(node.args) > len(names):
            raise Unknown
        if any(isinstance(each, ast.Starred) for each in node.args) or any(each.arg is None for each in node.keywords):
            return dict.fromkeys(names, UNKNOWN)
        given = {name: self.maybe(each) for name, each in zip(names, node.args, strict=False)}
        return given | {each.arg: self.maybe(each.value) for each in node.keywords if each.arg is not None}

    def _super(self, name: str, node: ast.Call) -> None:
        """Follow the constructor of the base class."""
        bases = [] if self.owner is None else [base for base in self.owner.bases() if base is not None]
        if not bases or not self.depth or not bases[0].module.name.startswith(KNOWN):
            self._change("self")
            return
        if name == "__init__":
            self.construct(bases[0], self._bound(positional(bases[0]), node))
        elif (found := method_of(bases[0], name)) is not None:
            owner, method = found
            # Its fields are those of this object.
            inner = Walk(owner.module, self._fields(), self.depth - 1, owner, self.kind)
            known = inner.follow(method.body) is not UNKNOWN
            self.names |= inner._fields()
            if known:
                return
        self._change("self")


def _leaves(node: ast.For) -> bool:
    return any(isinstance(each, ast.Break | ast.Continue) for each in ast.walk(node))
