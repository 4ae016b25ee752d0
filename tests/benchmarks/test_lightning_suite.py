"""Lightning's own tests under our strategy: how each is judged."""

from __future__ import annotations

import json
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from megalight.strategies import MegatronStrategy
from tests.callbacks.tiny import Tiny, tiny_trainer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
suite: Any = import_module("lightning_suite")

TESTS = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy


def test_same(): ...


def test_broken():
    raise ValueError("everywhere")


def test_default():
    assert isinstance(Trainer(accelerator="cpu", logger=False).strategy, SingleDeviceStrategy)


def test_file(tmp_path):
    trainer = Trainer(max_steps=1, accelerator="cpu", logger=False, default_root_dir=tmp_path)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert torch.load(tmp_path / "x.ckpt")["state_dict"]["layer.bias"].shape == (2,)


def test_other():
    assert type(Trainer(accelerator="cpu", logger=False).strategy).__name__ != "MegatronStrategy"
"""


def test_a_folder_reads_as_the_file_of_another_strategy(tmp_path: Path) -> None:
    module, found = Tiny(), []
    for strategy in (MegatronStrategy(), "auto"):
        torch.manual_seed(0)
        trainer = tiny_trainer(strategy=strategy, max_steps=2)
        trainer.fit(module := Tiny())
        trainer.save_checkpoint(tmp_path / "one.ckpt")
        path = tmp_path / "one.ckpt"
        found.append(suite.as_file(path) if path.is_dir() else torch.load(path, weights_only=False))
        trainer.strategy.remove_checkpoint(path)
    ours, theirs = found
    assert ours["state_dict"].keys() == theirs["state_dict"].keys() == module.state_dict().keys()
    for name, value in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], value)
    assert ours["global_step"] == theirs["global_step"] == 2
    assert ours["loops"].keys() == theirs["loops"].keys()
    groups = [each["optimizer_states"][0]["param_groups"][0]["lr"] for each in found]
    assert groups[0] == groups[1]


def test_each_test_has_one_judgement() -> None:
    assert suite.judged("core/test_x.py::test_y[1]", "KeyError: 'SLURM_NODEID'").startswith("SLURM's environment")
    assert suite.judged("core/test_x.py::test_y", "AssertionError: 1 != 2") is None


def test_what_nobody_judged_is_a_real_difference() -> None:
    ran = Counter(tests=9, passed=5, skipped=1, elsewhere=1)
    page = suite.report(ran, {"a.py::b": ("assert 0", None), "a.py::c": ("", suite.ONE_FILE)}, ["core/test_z.py"])
    assert "9 tests: 5 pass, 1 are skipped, 1 fail also without the strategy, and 2 pass without it" in page
    assert "| 1 | real differences |" in page
    assert "## Real differences\n\n- `a.py::b`" in page
    assert "but not core/test_z.py" in page


@pytest.mark.full
def test_the_whole_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "checkout" / "tests" / "tests_pytorch" / "core"
    place.mkdir(parents=True)
    (place / "test_x.py").write_text(TESTS)
    page = tmp_path / "page.md"
    words = [str(tmp_path / "checkout"), "--work", str(tmp_path / "work"), "--only", "core/", "--out", str(page)]
    for _ in range(2):  # the second call finds everything done
        monkeypatch.setattr(sys, "argv", ["lightning_suite.py", *words])
        suite.main()
        out = capsys.readouterr().out
        assert "core__test_x.py: 5 tests, 3 differ" in out
        assert "not judged: core/test_x.py::test_other" in out
    text = page.read_text()
    assert "5 tests: 1 pass, 0 are skipped, 1 fail also without the strategy, and 3 pass without it" in text
    assert f"{suite.ONE_FILE} |" in text
    assert "| 1 | real differences |" in text
    assert json.loads((tmp_path / "work/plain/core__test_x.py.jsonl").read_text().splitlines()[0])["test"]
