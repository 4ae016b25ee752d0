"""Count what a newcomer has to learn, or draw the package: ``python tools/structure.py [--enter | --tree]``.

It prints the number of files of the package, their lines, lines of code and median, the share of imports, classes that
share a name, public names, arguments of the strategies, and, with ``--enter``, how many files one token batch and one
weight enter: files of the package in which a Python function runs during a training step of a small GPT under
``MegatronStrategy``, and during the set-up of the strategy (split, storage, values, optimizer). ``--tree`` writes the
subpackages by import level into ``docs/structure.md``.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megalight"
PAGE = ROOT / "docs" / "structure.md"
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of all strings that stand as statements: docstrings, of attributes too."""
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    return {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def code_lines(path: Path, tree: ast.Module) -> set[int]:
    """Return the lines of a file that hold code: no comments, docstrings or blank lines."""
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in NO_CODE and token.string]
    return {n for token in tokens for n in range(token.start[0], token.end[0] + 1)} - docstring_lines(tree)


def import_lines(tree: ast.Module) -> set[int]:
    """Return the lines of import statements."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return {line for node in imports for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def counts() -> dict[str, Any]:
    """Return the figures of the source, by name."""
    files = sorted(PACKAGE.rglob("*.py"))
    lines, code, imports, public = [], 0, 0, 0
    classes: Counter[str] = Counter()
    for path in files:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines.append(len(text.splitlines()))
        code_of_file = code_lines(path, tree)
        code += len(code_of_file)
        imports += len(import_lines(tree) & code_of_file)
        classes.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        named = (node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef))
        public += sum(not node.name.startswith("_") for node in named)
    twice = sorted(name for name, count in classes.items() if count > 1)
    return {
        "files": len(files),
        "lines": sum(lines),
        "lines of code": code,
        "median lines of a file": statistics.median(lines),
        "longest file": max(lines),
        "imports, share of code": f"{imports / code:.1%}",
        "classes that share a name": len(twice),
        "public classes and functions": public,
    } | ({"of these": ", ".join(twice)} if twice else {})


def arguments() -> dict[str, int]:
    """Return the number of arguments of each strategy; a recipe has as many keys for it."""
    from megalight import strategies

    found = {name: value for name, value in vars(strategies).items() if name.endswith("Strategy")}
    return {f"arguments of {name}": len(inspect.signature(value).parameters) for name, value in sorted(found.items())}


@contextmanager
def watched(entered: set[str]) -> Iterator[None]:
    """Add to ``entered`` the files of the package whose functions run."""

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            entered.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


def entered() -> dict[str, int]:
    """Train one step of a small GPT, and return how many files run for its weights and for its batch."""
    import lightning.pytorch as pl
    import torch

    from megalight.models.gpt import GPTConfig
    from megalight.models.gpt.module import GPTModule
    from megalight.strategies import MegatronStrategy
    from megalight.types import TokenBatch

    weight: set[str] = set()
    batch: set[str] = set()

    def within(function: Callable[..., Any], files: set[str]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with watched(files):
                return function(*args, **kwargs)

        return run

    strategy = MegatronStrategy()
    strategy.setup = within(strategy.setup, weight)  # type: ignore[method-assign]
    strategy.training_step = within(strategy.training_step, batch)  # type: ignore[method-assign]
    strategy.optimizer_step = within(strategy.optimizer_step, batch)  # type: ignore[method-assign]
    model = GPTModule(GPTConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, max_sequence_length=64))
    rows = torch.arange(8 * 65).view(8, 65) % 256

    def collate(samples: list[Any]) -> TokenBatch:
        tokens = torch.stack(samples)
        return TokenBatch(tokens[:, :-1], tokens[:, 1:], torch.ones(len(tokens), 64))

    loader = torch.utils.data.DataLoader(list(rows), batch_size=4, collate_fn=collate)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=2, **quiet).fit(model, loader)
    return {"files that a batch enters": len(batch), "files that a weight enters": len(weight)}


def tree() -> str:
    """Draw the subpackages by import level, the highest first, each with the first sentence of its docstring."""
    source = ast.parse((ROOT / "tests" / "test_import_levels.py").read_text(encoding="utf-8"))
    assigned = (node for node in source.body if isinstance(node, ast.Assign))
    levels = next(node.value for node in assigned if ast.unparse(node.targets[0]) == "LEVELS")
    lines = []
    for level, names in reversed(list(enumerate(ast.literal_eval(levels)))):
        for name in sorted(names - {"__main__"}):
            folder = PACKAGE / name
            path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
            about = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
            lines.append(f"{level:<4}{name + ('/' if folder.is_dir() else '.py'):15}{about.split('. ')[0].rstrip('.')}")
    return "\n".join(lines)


def drawn(page: str) -> str:
    """Return the text of a page with the tree between its markers."""
    return re.sub("(<!-- tree -->\n```\n).*?(\n```)", lambda found: found[1] + tree() + found[2], page, flags=re.DOTALL)


def main() -> None:
    """Print the figures, or write the tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--enter", action="store_true", help="also train one step, and count the files that run for it")
    parser.add_argument("--tree", action="store_true", help="write the tree of docs/structure.md")
    sys.path.insert(0, str(ROOT))
    if parser.parse_args().tree:
        PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    figures = counts() | arguments()
    if parser.parse_args().enter:
        figures |= entered()
    for name, value in figures.items():
        print(f"{name:34} {value}")


if __name__ == "__main__":
    main()
