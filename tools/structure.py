"""Count what a newcomer has to learn, or draw the package: ``python tools/structure.py [--enter [--files] | --tree]``.

It prints the number of files of the package, their lines, lines of code and median, the share of imports, classes that
share a name, public names and arguments of the strategies.

``--enter`` also counts the files that one token batch enters in a training step of a small GPT under
``MegatronStrategy``, and one weight (``layers.0.attention.qkv.weight``) in the set-up: split, storage, values,
optimizer. A file is entered if one of its functions has the thing in hand, as an argument, a variable or a result: the
batch and any tensor computed from it, gradients too; the weight, its shape, its module, or flat memory that holds it.
The number of files in which any function runs meanwhile, checks and registries too, is printed beside it. ``--files``
lists both. ``--tree`` writes the subpackages by import level into ``docs/structure.md``.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import logging
import re
import statistics
import sys
import tokenize
import warnings
from collections import Counter
from collections.abc import Callable
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


WEIGHT = 192, 64
"""Shape of the weight that is followed. No other of the small GPT has it."""


def of_batch(value: object) -> bool:
    """Whether a value is computed from the batch: in a step, every tensor but a parameter."""
    import torch

    return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)


def of_weight(value: object) -> bool:
    """Whether a value is the weight, its shape, or flat memory with room for it."""
    import torch

    if isinstance(value, torch.Tensor):
        return tuple(value.shape) == WEIGHT or (value.ndim == 1 and value.numel() >= WEIGHT[0] * WEIGHT[1])
    return isinstance(value, tuple) and all(type(each) is int for each in value) and value == WEIGHT


def in_hand(value: Any, wanted: Callable[[object], bool], depth: int = 3) -> bool:
    """Whether a value is wanted, or has a wanted one inside: containers, dataclasses, a module's own parameters."""
    import torch

    if wanted(value):
        return True
    if isinstance(value, torch.nn.Module):
        return any(map(wanted, vars(value).get("_parameters", {}).values()))
    if isinstance(value, dict):
        inside = list(value.values())
    elif isinstance(value, list | tuple | set):
        inside = list(value)
    elif dataclasses.is_dataclass(value) or type(value).__module__.startswith("megalight.types"):
        inside = list(getattr(value, "__dict__", {}).values())
    else:
        return False
    return depth > 0 and any(in_hand(each, wanted, depth - 1) for each in inside)


class Files:
    """The files of the package that something enters.

    Args:
        wanted: whether a value is the thing, or a part of it.

    Attributes:
        entered: those with a function that has it in hand.
        run: those with a function that runs.
    """

    def __init__(self, wanted: Callable[[object], bool]) -> None:
        self.wanted = wanted
        self.entered: set[str] = set()
        self.run: set[str] = set()

    def during(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, which then adds to the files in each call."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            before = sys.getprofile()
            sys.setprofile(self._profile)
            try:
                return function(*args, **kwargs)
            finally:
                sys.setprofile(before)

        return watched

    def _profile(self, frame: Any, event: str, result: Any) -> None:
        file = frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith(str(PACKAGE)):
            return
        file = str(Path(file).relative_to(PACKAGE))
        self.run.add(file)
        if file not in self.entered and in_hand([result, *frame.f_locals.values()], self.wanted, 4):
            self.entered.add(file)


def entered() -> tuple[Files, Files]:
    """Train two steps of a small GPT, and return the files of its batches, and of one of its weights."""
    import lightning.pytorch as pl
    import torch

    from megalight.models.gpt import GPTConfig
    from megalight.models.gpt.module import GPTModule
    from megalight.strategies import MegatronStrategy
    from megalight.types import TokenBatch

    batch, weight = Files(of_batch), Files(of_weight)
    strategy = MegatronStrategy()
    strategy.setup = weight.during(strategy.setup)  # type: ignore[method-assign]
    strategy.training_step = batch.during(strategy.training_step)  # type: ignore[method-assign]
    strategy.optimizer_step = batch.during(strategy.optimizer_step)  # type: ignore[method-assign]
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
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):
        pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=2, **quiet).fit(model, loader)
    return batch, weight


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
    parser.add_argument("--enter", action="store_true", help="also count the files that a batch and a weight enter")
    parser.add_argument("--files", action="store_true", help="list these files")
    parser.add_argument("--tree", action="store_true", help="write the tree of docs/structure.md")
    sys.path.insert(0, str(ROOT))
    given = parser.parse_args()
    if given.tree:
        PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    figures = counts() | arguments()
    followed = dict(zip(("a batch", "a weight"), entered(), strict=True)) if given.enter or given.files else {}
    for name, files in followed.items():
        figures |= {f"files that {name} enters": len(files.entered), f"files that run for {name}": len(files.run)}
    for name, value in figures.items():
        print(f"{name:34} {value}")
    for name, files in followed.items() if given.files else ():
        print(f"\n{name} enters:", *sorted(files.entered), sep="\n  ")
        print("\nbeside these run:", *sorted(files.run - files.entered), sep="\n  ")


if __name__ == "__main__":
    main()
