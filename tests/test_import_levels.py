"""Imports go downwards only, Lightning stays above its line, and one-device code speaks of one device.

Each rule is a function from a source file to complaints, so that a test can also show that it complains.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source import PACKAGE, ROOT, Import, Source, sources, subpackage

LEVELS = (
    {"attachments", "errors", "migration", "registry", "types", "imports", "first_rank", "hub"},
    {"ops", "data"},
    {"nn"},
    {"parallel"},
    {"optim", "checkpoint"},
    {"models", "training", "sharding"},
    {"plugins", "inference", "towers"},
    {"strategies", "evaluation"},
    {"callbacks", "loggers", "serving"},
    {"rl"},
    {"cli"},
    {"__main__"},
)
LEVEL_OF = {name: level for level, subpackages in enumerate(LEVELS) for name in subpackages}
LIGHTNING_LEVEL = LEVEL_OF["strategies"]
LIGHTNING_FOLDERS = ("megalight.plugins.precision", "megalight.plugins.checkpoint_io")
LIGHTNING_FILE = "module"
OPTIONAL = {"transformers", "pyarrow", "matplotlib", "triton", "huggingface_hub", "httpx", "datasets", "lm_eval"}
"""Third-party packages that the product works without; a function may import them when it is called."""

PARALLEL_WORDS = re.compile(
    r"(?<!low-)\branks?\b|\bgroup\b|process_?group|\bmesh(es)?\b|device_?mesh|world_?size|\bdtensors?\b|\bshard(s|ed|ing)?\b"
    r"|(tensor|sequence|context|pipeline|expert|data|model)[_ -]parallel|torch\.distributed|\bdist\."
    r"|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|\b(tp|cp|dp|pp|ep|etp|edp)\b",
    re.IGNORECASE,
)
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
PICKLES = "checkpoint/foreign/pickles.py"
"""The one file that may import pickle: what it reads becomes plain records."""
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "os.system",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
}
FORBIDDEN_KEYWORDS = {"trust_remote_code": True, "allow_pickle": True, "shell": True, "weights_only": False}


PLUGIN_GROUP = "megalight.plugins"
"""The entry-point group: a name, not an import of the subpackage of the same name."""


def uses(source: Source) -> Iterator[tuple[Import, str]]:
    """What a file takes from the package, with its subpackage: imports, module names in strings."""
    for found in source.imports():
        if found.module.split(".")[0] == "megalight" and found.module != "megalight.__version__":
            yield found, subpackage(found.module)
    for node in source.nodes:
        text = node.value if isinstance(node, ast.Constant) else None
        if (
            isinstance(text, str)
            and text != PLUGIN_GROUP
            and (text in modules() or re.match(r"megalight\.\w+\.$", text))
        ):
            yield Import(text, node.lineno, lazy=True), subpackage(text)


@functools.cache
def modules() -> frozenset[str]:
    return frozenset(source.module for source in sources()) - {"megalight"}


def import_levels(source: Source) -> Iterator[str]:
    """Downwards only, and no neighbors. The few modules of level 0 are one subpackage."""
    if source.module == "megalight":
        return
    if source.subpackage not in LEVEL_OF:
        yield f"{source.path}: subpackage {source.subpackage!r} has no import level"
        return
    level = LEVEL_OF[source.subpackage]
    for found, other in uses(source):
        where = f"{source.path}:{found.line}"
        if other not in LEVEL_OF:
            yield f"{where}: imports {found.module}; take it from the subpackage that defines it"
        elif other != source.subpackage and LEVEL_OF[other] >= max(level, 1):
            yield f"{where}: level {level} ({source.subpackage}) imports level {LEVEL_OF[other]} ({other})"


def lazy_imports(source: Source) -> Iterator[str]:
    """Functions import nothing but optional packages; verbs and the package's own lazy names are the exceptions."""
    if source.subpackage in ("cli", "__main__", ""):
        return
    for found in source.imports():
        if found.lazy and found.module.split(".")[0] not in OPTIONAL:
            yield f"{source.path}:{found.line}: imports {found.module} inside a function"


def may_use_lightning(source: Source) -> bool:
    return (
        LEVEL_OF.get(source.subpackage, 0) >= LIGHTNING_LEVEL
        or source.module.startswith(LIGHTNING_FOLDERS)
        or source.module.endswith(f".{LIGHTNING_FILE}")
    )


def lightning_line(source: Source) -> Iterator[str]:
    """Lightning is imported by its import levels and by files called module.py, which nothing below imports."""
    for found in source.imports():
        where = f"{source.path}:{found.line}"
        package = found.module.split(".")[0]
        if package in ("pytorch_lightning", "lightning_fabric"):
            yield f"{where}: {package} has other classes of the same names; import lightning.pytorch as pl"
        if may_use_lightning(source):
            continue
        if package == "lightning":
            yield f"{where}: imports lightning below its line"
        if package == "megalight" and LIGHTNING_FILE in found.module.split(".")[2:]:
            yield f"{where}: imports {found.module}, which imports lightning"


def one_device(source: Source) -> Iterator[str]:
    """Layers and models say nothing of other devices, not even in comments."""
    is_model = source.subpackage == "models" and source.module.endswith(".model")
    if source.subpackage != "nn" and not is_model:
        return
    for number, line in enumerate(source.text.splitlines(), start=1):
        if found := PARALLEL_WORDS.search(line):
            yield f"{source.path}:{number}: {found.group()!r} in one-device code: {line.strip()}"


def name_of(node: ast.expr) -> str:
    """``a.b.c`` for names and attributes of names, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := name_of(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def code_from_data(source: Source) -> Iterator[str]:
    """Nothing that is read from disk or typed by a user can become code."""
    for found in source.imports():
        allowed = found.module == "pickle" and str(source.path).endswith(PICKLES)
        if found.module.split(".")[0] in FORBIDDEN_MODULES and not allowed:
            yield f"{source.path}:{found.line}: imports {found.module}"
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        if name_of(node.func) in FORBIDDEN_CALLS:
            yield f"{source.path}:{node.lineno}: calls {name_of(node.func)}"
        for keyword in node.keywords:
            if keyword.arg in FORBIDDEN_KEYWORDS:
                safe = not FORBIDDEN_KEYWORDS[keyword.arg]
                if not (isinstance(keyword.value, ast.Constant) and keyword.value.value in (safe, None)):
                    yield f"{source.path}:{node.lineno}: {keyword.arg} must be {safe}"


RULES = (import_levels, lazy_imports, lightning_line, one_device, code_from_data)


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps(rule: type) -> None:
    complaints = [complaint for source in sources() for complaint in rule(source)]
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize(
    ("rule", "file", "text"),
    [
        (import_levels, "nn/a.py", "import megalight.parallel.mesh"),
        (import_levels, "nn/a.py", "from megalight import parallel"),
        (import_levels, "nn/deep/a.py", "from ...parallel import mesh"),
        (import_levels, "nn/a.py", "from megalight import GPT"),
        (import_levels, "nn/a.py", "if TYPE_CHECKING:\n    from megalight.models.gpt import GPT"),
        (import_levels, "ops/a.py", "from megalight.data.indexed import x"),
        (import_levels, "optim/a.py", "def f():\n    from megalight.checkpoint import save"),
        (import_levels, "types.py", "from megalight.ops import attention"),
        (import_levels, "novel/a.py", "import torch"),
        (lazy_imports, "nn/a.py", "def f():\n    import megalight.ops"),
        (lazy_imports, "nn/a.py", "class A:\n    def f(self):\n        from math import pi"),
        (import_levels, "nn/a.py", "importlib.import_module('megalight.cli')"),
        (import_levels, "ops/a.py", "importlib.import_module(f'megalight.data.{name}')"),
        (lightning_line, "optim/a.py", "import lightning.pytorch as pl"),
        (lightning_line, "optim/a.py", "from lightning.pytorch import Trainer"),
        (lightning_line, "models/gpt/__init__.py", "from megalight.models.gpt.module import GPTModule"),
        (lightning_line, "models/gpt/model.py", "from .module import GPTModule"),
        (lightning_line, "strategies/a.py", "import pytorch_lightning as pl"),
        (one_device, "nn/a.py", "# the mesh decides"),
        (one_device, "nn/a.py", "rank = 3"),
        (one_device, "nn/a.py", "def f(tp: int): ..."),
        (one_device, "models/gpt/model.py", "import torch.distributed as d"),
        (one_device, "models/gpt/model.py", '"""Tensor-parallel attention."""'),
        (code_from_data, "data/a.py", "import pickle"),
        (code_from_data, "data/a.py", "from cloudpickle import loads"),
        (code_from_data, "cli/a.py", "eval(text)"),
        (code_from_data, "cli/a.py", "yaml.load(text)"),
        (code_from_data, "checkpoint/a.py", "torch.load(path, weights_only=False)"),
        (code_from_data, "checkpoint/a.py", "torch.load(path, weights_only=flag)"),
        (code_from_data, "models/a.py", "AutoModel.from_pretrained(name, trust_remote_code=True)"),
        (code_from_data, "data/a.py", "np.load(path, allow_pickle=True)"),
    ],
)
def test_a_rule_complains(rule: type, file: str, text: str, tmp_path: Path) -> None:
    assert len(list(rule(source_of(file, text, tmp_path)))) == 1


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("nn/a.py", "from megalight.ops.linear import linear\nfrom megalight.nn.canonical import parts"),
        ("registry.py", "from megalight.errors import MegalightError"),
        ("parallel/a.py", "PLANS.register('megalight.models.gpt.model.GPT')(plan)"),
        ("nn/a.py", '"""megalight.cli is higher up."""\ng = "megalight.plugins"'),
        ("cli/a.py", "def f():\n    from megalight.strategies import x"),
        ("data/a.py", "def f():\n    import pyarrow.parquet"),
        ("ops/a.py", "import importlib\nimportlib.import_module(f'megalight.ops.{name}')"),
        ("models/gpt/module.py", "import lightning.pytorch as pl\nfrom megalight.models.module import M"),
        ("plugins/precision/a.py", "from lightning.pytorch.plugins import Precision"),
        ("nn/a.py", "# groups of query heads, low-rank, grouped-query: kv_lora_rank, grouping, broadcast, stepped"),
        ("parallel/a.py", "# rank and mesh\nmodel.eval()"),
        ("checkpoint/a.py", "torch.load(path, weights_only=True)\nyaml.safe_load(text)"),
    ],
)
def test_no_rule_complains(file: str, text: str, tmp_path: Path) -> None:
    source = source_of(file, text, tmp_path)
    assert not [complaint for rule in RULES for complaint in rule(source)]


def source_of(file: str, text: str, root: Path) -> Source:
    path = root / "megalight" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return Source.of(path, root)


def loaded_by(source: Source, known: frozenset[str]) -> set[str]:
    """The modules of the package that must be complete before this one is, if it is the first to be imported.

    An import of ``a.b.c`` runs ``a`` and ``a.b`` before. The module's own packages have begun and need not be complete.
    """
    own = {source.module.rsplit(".", count)[0] for count in range(source.module.count(".") + 1)}
    found = set()
    for taken in source.imports():
        if taken.lazy or taken.typing:
            continue
        module = taken.module if taken.module in known else taken.module.rpartition(".")[0]
        if module in known:
            parents = {module.rsplit(".", count)[0] for count in range(1, module.count(".") + 1)}
            found |= {module} | (parents - own)
    return found - {source.module}


def test_any_module_may_be_imported_first() -> None:
    known = modules() | {"megalight"}
    # raises CycleError, which names the cycle
    graphlib.TopologicalSorter({source.module: loaded_by(source, known) for source in sources()}).prepare()


def test_every_subpackage_has_an_import_level() -> None:
    subpackages = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert subpackages - {"__init__"} <= set(LEVEL_OF)


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, megalight; assert not {'torch', 'lightning', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "words",
    [["plain_loop.py", "--steps", "2"], pytest.param(["fully_shard_llama.py"], marks=pytest.mark.full)],
    ids=["plain_loop", "fully_shard_llama"],
)
def test_all_below_the_line_works_without_lightning(words: list[str]) -> None:
    """The line holds for what third-party packages import as well, and for plain loops. One process for all imports."""
    below = [source.module for source in sources() if not may_use_lightning(source)]
    code = f"""
import importlib, runpy, sys
sys.modules["lightning"] = sys.modules["pytorch_lightning"] = sys.modules["lightning_fabric"] = None  # not installed
for name in {below!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        missing = (error.__cause__ or error).name
        if missing.split(".")[0] not in {OPTIONAL!r}:
            raise
sys.argv = {words!r}
runpy.run_path("examples/" + sys.argv[0], run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("at first") == 1
