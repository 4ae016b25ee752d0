"""The repository's own rules: budgets, versions, what may stand in a file, and what may not."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path
from statistics import median

import pytest
import structure
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import megalight
from tests.support.source import PACKAGE, ROOT, sources
from tests.test_imports import pyproject

MAX_LINES = 1000
MIN_MEDIAN_LINES = 80
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".ipynb", ".cfg", ".sh", ""}
STEMS = ("initialis", "materialis", "normalis", "quantis", "tokenis", "synchronis", "vectoris", "specialis", "utilis")
BRITISH = (*(f"{stem}{end}" for stem in STEMS for end in ("e", "in", "at")), "neighbour", "colour", "misspelt")
"""Beginnings of words; torch, Lightning and Megatron spell them in the American way."""
MACHINE = re.compile(
    r"(?<![\w.~])/(work|root|home)/|pypi\.org|pythonhosted|download\.pytorch|index-url|\bTODO\b|\bFIXME\b|\bXXX\b"
)


def git(*words: str) -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def tracked() -> list[Path]:
    return [ROOT / name for name in git("ls-files") if (ROOT / name).is_file()]


def requirements() -> list[Requirement]:
    project = pyproject()
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return [requirement for requirement in map(Requirement, lines) if requirement.name != "megalight"]


def constraints() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins}


def test_no_file_is_long() -> None:
    long = {str(s.path): count for s in sources() if (count := len(s.text.splitlines())) > MAX_LINES}
    assert not long, f"more than {MAX_LINES} lines; one file tells one concept of the field: {long}"


def test_no_folder_is_of_small_files() -> None:
    lengths: dict[Path, list[int]] = {}
    for source in sources():
        lengths.setdefault(source.path.parent.relative_to(ROOT), []).append(len(source.text.splitlines()))
    small = {str(folder): found for folder, counts in lengths.items() if (found := median(counts)) < MIN_MEDIAN_LINES}
    assert not small, (
        f"the median file has fewer than {MIN_MEDIAN_LINES} lines; merge files that are read together: {small}"
    )


def test_no_module_state_is_rebound() -> None:
    found = [f"{s.path}:{node.lineno}" for s in sources() for node in s.nodes if isinstance(node, ast.Global)]
    assert not found, f"global statements: {found}"


def test_nothing_is_unfinished_or_of_one_machine() -> None:
    this = Path(__file__).resolve()
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in tracked()
        if path.suffix in TEXT and path.name != "LICENSE" and path != this
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if MACHINE.search(line)
    ]
    assert not found, "\n" + "\n".join(found)


def test_words_are_spelled_as_torch_does() -> None:
    exempt = {Path(__file__).resolve(), ROOT / "CHANGELOG.md"}
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in tracked()
        if path.suffix in (".py", ".md", ".yaml") and path not in exempt
        for text in [path.read_text(encoding="utf-8").lower()]
        for word in BRITISH
        if word in text
    ]
    assert not found, "a user who searches for one spelling must find all (initialize, neighbor):\n" + "\n".join(found)


def test_the_drawing_of_the_package_is_up_to_date() -> None:
    page = structure.PAGE.read_text(encoding="utf-8")
    assert structure.drawn(page) == page, "run: python tools/structure.py --tree"


def test_git_holds_no_ignored_file() -> None:
    assert not git("ls-files", "--cached", "--ignored", "--exclude-standard")


def test_every_module_folder_is_a_package() -> None:
    folders = {s.path.parent for s in sources()}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_tests_mirror_the_tree() -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    for folder in folders:
        assert (ROOT / "tests" / folder / "__init__.py").exists(), f"tests/{folder} has no __init__.py"
        subpackage = folder.parts[0] if folder.parts else ""
        assert (PACKAGE / subpackage).is_dir() or (ROOT / subpackage).is_dir() or subpackage == "support", (
            f"tests/{folder} mirrors nothing"
        )


def test_what_is_required_is_pinned_within_its_range() -> None:
    pins = constraints()
    for requirement in requirements():
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"constraints.txt does not pin {requirement.name}"
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        assert requirement.specifier.contains(specifier.version), f"{requirement} excludes the pin {pin}"


def test_what_is_imported_is_required() -> None:
    known = {canonicalize_name(requirement.name) for requirement in requirements()} | {"megalight", "triton"}  # torch's
    providers = packages_distributions()
    for source in sources():
        for found in source.imports():
            root = found.module.split(".")[0]
            names = set(map(canonicalize_name, providers.get(root, [root])))
            assert root in sys.stdlib_module_names or known & names, f"{source.path}:{found.line}: {root}"


def test_pins_name_no_build_and_no_place() -> None:
    for pin in constraints().values():
        assert "+" not in str(pin.specifier)
        assert pin.url is None


def test_one_version_number() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d+\.\d+\.\d+)", changes, re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == megalight.__version__


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert pyproject()["license"] == "Apache-2.0"


def test_the_console_script_exists() -> None:
    (script,) = entry_points(group="console_scripts", name="megalight")
    assert callable(script.load())


def test_continuous_integration_runs_checks_and_tests() -> None:
    run = ROOT / ".ci" / "run"
    assert run.stat().st_mode & 0o100, ".ci/run is not executable"
    assert run.read_text(encoding="utf-8").splitlines()[-2:] == ["make checks", "exec make test"]


@pytest.mark.parametrize(
    "target", ["help", "setup", "demo", "test", "test-full", "checks", "docs-check", "format", "clean"]
)
def test_make_targets_are_listed(target: str) -> None:
    answer = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert re.search(rf"^{target} +\S", answer, re.MULTILINE), answer
    subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_workflows_run_targets_that_exist() -> None:
    """GitHub runs the same targets of make as a developer does."""
    found = set()
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        found |= set(re.findall(r"\bmake ((?:[a-z-]+ ?)+)", path.read_text(encoding="utf-8")))
    targets = {word for words in found for word in words.split()}
    assert targets >= {"checks", "test", "test-full", "test-gpu", "site", "docs-check"}
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)
