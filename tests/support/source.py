"""The package's source for tests of its structure: files, their top-level folders "subpackages", and their imports."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megalight"


@dataclass(frozen=True)
class Import:
    """One imported module.

    Attributes:
        module: full dotted name.
        line: number of the line.
        lazy: whether the import is inside a function.
        typing: whether the import is for type checkers only.
    """

    module: str
    line: int
    lazy: bool
    typing: bool = False


@dataclass(frozen=True)
class Source:
    """One Python file. ``module`` is its dotted name, and ``subpackage`` the part of it below the package."""

    path: Path
    module: str

    @classmethod
    def of(cls, path: Path, root: Path = ROOT) -> Source:
        parts = path.relative_to(root).with_suffix("").parts
        return cls(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts))

    @property
    def subpackage(self) -> str:
        return subpackage(self.module)

    @functools.cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @property
    def package(self) -> str:
        """The package to which relative imports are relative."""
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]

    def imports(self) -> Iterator[Import]:
        """Yield every import in the file. ``from a import b`` counts as ``a.b``, because ``b`` may be a module."""
        yield from self._found

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree."""
        return tuple(ast.walk(self.tree))

    @functools.cached_property
    def _found(self) -> tuple[Import, ...]:
        return tuple(self._imports(self.tree, lazy=False, typing=False))

    def _imports(self, node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, lazy, typing)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(f"{self._base(node)}.{alias.name}", node.lineno, lazy, typing)
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing = typing or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            yield from self._imports(child, lazy, typing)

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parents = self.package.split(".")[: len(self.package.split(".")) - node.level + 1]
        return ".".join([*parents, node.module] if node.module else parents)


def subpackage(module: str) -> str:
    """Return the subpackage of a module: ``megalight.nn.linear`` -> ``nn``; the package itself -> an empty string."""
    return module.split(".")[1] if "." in module else ""


@functools.cache
def sources() -> tuple[Source, ...]:
    """Return all Python files of the package."""
    return tuple(Source.of(path) for path in sorted(PACKAGE.rglob("*.py")))
