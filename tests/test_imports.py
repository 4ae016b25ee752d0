import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from megalight.errors import MissingPackageError
from megalight.imports import EXTRAS, deferred, has, has_grad_dtype, in_backward, require, torch_distributed, version

ROOT = Path(__file__).parents[1]


def pyproject() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_has() -> None:
    assert has("torch")
    assert not has("no_such_package_anywhere")
    assert not has("no_such_package_anywhere.inner")


def test_version() -> None:
    assert version("lightning").startswith("2.6")
    assert version("no-such-distribution-anywhere") is None


def test_require_imports() -> None:
    assert require("json.decoder", "reading").__name__ == "json.decoder"


def test_require_names_the_purpose_and_the_command() -> None:
    with pytest.raises(MissingPackageError, match=r"baking needs the package 'no_such_oven'.*pip install no_such_oven"):
        require("no_such_oven.tray", "baking")


def test_require_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "no_such_oven", "bakery")
    with pytest.raises(MissingPackageError, match=r"is not installed.*pip install 'megalight\[bakery\]'"):
        require("no_such_oven", "baking")


@pytest.mark.parametrize("line", ["raise OSError('libflour.so.3')", "import libflour_so"])
def test_require_tells_a_broken_package_from_a_missing_one(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_oven.py").write_text(line)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingPackageError, match=r"is installed but could not be imported .*libflour"):
        require("broken_oven", "baking")


def test_extras_are_those_of_the_project() -> None:
    extras = pyproject()["optional-dependencies"]
    for package, extra in EXTRAS.items():
        names = [re.split(r"[<>=!;\[ ]", requirement)[0] for requirement in extras[extra]]
        others = {"modelopt": "nvidia-modelopt", "PIL": "pillow", "zmq": "pyzmq"}
        assert canonicalize_name(others.get(package, package)) in map(canonicalize_name, names)


def test_packages_asked_for_by_name_have_an_extra() -> None:
    """An optional package that some module requires can be installed with the command that its error message names."""
    known = {*EXTRAS, "triton"}  # torch brings triton for GPUs; alone, it has the name of its package
    for path in (ROOT / "megalight").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "from megalight.imports import" in text else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "require":
                package = node.args[0]
                if path.name == "trainer.py" and isinstance(package, ast.Name):
                    continue  # the packages of TRACKERS, which have the names of their distributions
                assert isinstance(package, ast.Constant), f"{path}:{node.lineno}"
                assert package.value.partition(".")[0] in known, f"{path}:{node.lineno} requires {package.value}"


@pytest.fixture
def oven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package, and a module that takes names from it."""
    (tmp_path / "slow_oven").mkdir()
    (tmp_path / "slow_oven" / "__init__.py").write_text("class Tray:\n    size = 3\n")
    (tmp_path / "slow_oven" / "door.py").write_text("from . import Tray\n")
    (tmp_path / "oven_baker.py").write_text("from slow_oven import Tray\n\ndef bake() -> Tray: ...\n")
    (tmp_path / "oven_porter.py").write_text("import slow_oven.door\n\nTray = slow_oven.door.Tray\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "slow_oven"
    for name in ("slow_oven", "slow_oven.door", "oven_baker", "oven_porter"):
        sys.modules.pop(name, None)


def test_a_deferred_package_is_imported_where_its_names_are_used(oven: str) -> None:
    with deferred(oven):
        tray = importlib.import_module("oven_baker").Tray
    assert oven not in sys.modules
    assert tray.size == 3
    real = sys.modules[oven].Tray
    assert isinstance(tray(), real)
    assert isinstance(real(), tray)
    assert not isinstance(3, tray)


def test_names_may_be_used_while_the_package_is_deferred(oven: str) -> None:
    with deferred(oven):
        assert importlib.import_module("oven_baker").Tray.size == 3
    assert sys.modules[oven].Tray.size == 3


def test_a_submodule_of_a_deferred_package_needs_the_package(oven: str) -> None:
    with deferred(oven):
        baker, porter = importlib.import_module("oven_baker"), importlib.import_module("oven_porter")
    assert porter.Tray is sys.modules[oven].Tray
    assert baker.Tray.size == 3


def test_what_is_imported_already_or_missing_is_not_deferred(oven: str) -> None:
    real = importlib.import_module(oven)
    with deferred(oven), deferred("no_such_package_anywhere"):
        assert importlib.import_module("oven_baker").Tray is real.Tray
        assert not has("no_such_package_anywhere")
    assert sys.modules[oven] is real


def test_torch_shims() -> None:
    import torch

    assert torch_distributed("no_such_collective", "all_reduce") is torch.distributed.all_reduce
    assert has_grad_dtype() == hasattr(torch.ones(1), "grad_dtype")


def test_torch_tells_whether_a_backward_runs() -> None:
    """Fails where torch's private function has gone: auxiliary losses of recomputed layers need it."""
    import torch

    seen = [in_backward()]
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(in_backward()))
    y.backward()
    assert [*seen, in_backward()] == [False, True, False]


def test_floor_zero_imports_no_torch_but_in_types() -> None:
    code = "import sys, megalight.errors, megalight.imports, megalight.registry; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
