"""What ``--ckpt_path=last`` and ``auto`` mean: the newest checkpoint of all runs under the root folder."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalight import checkpoint
from megalight.checkpoint import Box, View, save
from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.cli import checkpoints
from megalight.cli.checkpoints import resolve
from megalight.cli.lightning import parsed
from megalight.cli.main import main
from megalight.errors import CheckpointError
from megalight.inference import load_model
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.nn.canonical import canonical_tensors

WORDS = [
    "fit",
    "--model=tests.cli.samples.SampleModule",
    "--data=tests.cli.samples.SampleData",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.log_every_n_steps=1",
]

pytestmark = pytest.mark.filterwarnings("ignore:.*weights_only.*", "ignore:.*dirpath has changed.*")


@pytest.fixture(autouse=True)
def _quiet_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)


def first_step(root: Path, version: int) -> int:
    """The first step that a run logged."""
    with (root / "lightning_logs" / f"version_{version}" / "metrics.csv").open() as lines:
        return min(int(row["step"]) for row in csv.DictReader(lines))


@pytest.mark.parametrize("wanted", ["last", "auto"])
def test_a_run_goes_on_from_the_newest_checkpoint_of_earlier_ones(wanted: str, tmp_path: Path) -> None:
    root = f"--trainer.default_root_dir={tmp_path}"
    assert main([*WORDS, root, "--trainer.max_epochs=1", *(["--ckpt_path=auto"] if wanted == "auto" else [])]) == 0
    assert first_step(tmp_path, 0) == 0
    assert main([*WORDS, root, "--trainer.max_epochs=2", f"--ckpt_path={wanted}"]) == 0
    assert first_step(tmp_path, 1) == 4


def test_last_without_a_checkpoint_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, f"--trainer.default_root_dir={tmp_path}", "--trainer.max_epochs=1", "--ckpt_path=last"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"there is no finished checkpoint under {tmp_path}" in error
    assert "--ckpt_path=auto" in error
    assert not (tmp_path / "lightning_logs").exists()


def test_folders_and_files_are_compared_by_age(tmp_path: Path) -> None:
    folder, file = tmp_path / "a" / "checkpoints" / "step=2.ckpt", tmp_path / "b" / "epoch=0.ckpt"
    save(folder, {})
    file.parent.mkdir()
    file.touch()
    os.utime(file, ns=(0, 10))
    assert resolve("last", "fit", [tmp_path]) == str(folder)
    os.utime(file, ns=(0, 2**62))
    assert resolve("auto", "fit", [tmp_path / "a", tmp_path]) == str(file)


def test_a_folder_of_runs_means_its_newest_checkpoint(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / "runs" / name / "step=1.ckpt", {})
    found = str(tmp_path / "runs" / "b" / "step=1.ckpt")
    assert resolve(str(tmp_path / "runs"), "validate", []) == found
    assert resolve(found, "fit", []) == found
    (tmp_path / "empty").mkdir()
    assert latest_checkpoint(tmp_path / "empty") == tmp_path / "empty"


def test_a_run_without_a_checkpoint_is_no_reason_to_name_another_run(tmp_path: Path) -> None:
    save(tmp_path / "other", {})
    (tmp_path / "run" / "lightning_logs").mkdir(parents=True)
    (tmp_path / "torn" / "data").mkdir(parents=True)
    for name, hint in (("run", False), ("torn", True), ("absent", True)):
        with pytest.raises(CheckpointError, match="not a finished Megalight checkpoint") as error:
            checkpoint.open(tmp_path / name)
        assert ("beside it is" in str(error.value)) == hint, name


def test_the_weights_of_a_run_are_those_of_its_newest_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "run" / "a.ckpt", {})
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "vocab_size": 8, "max_sequence_length": 8}
    words = [*WORDS, "--model=GPTModule", *(f"--model.config.{name}={value}" for name, value in sizes.items())]
    for folder, found in (("run", "run/a.ckpt"), ("elsewhere", "elsewhere")):
        cli = parsed([*words, f"--model.weights={tmp_path / folder}"])
        assert cli.model.weights == str(tmp_path / found)
        # What run.yaml will say: by then the folder may hold another one.
        assert cli.config.fit.model.init_args.weights == str(tmp_path / found)


def test_a_module_takes_the_weights_of_a_run(tmp_path: Path) -> None:
    """Without the command, too: the configuration and the weights are those of the newest checkpoint."""
    config = GPTConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=8, max_sequence_length=8)
    for name, value in (("a", 1.0), ("b", 2.0)):
        whole = config if name == "b" else replace(config, vocab_size=9)
        model = GPT(whole)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        views = {
            f"model.{n}": View(f"model.{n}", t.shape, [Box((0,) * t.ndim, t)])
            for n, t in canonical_tensors(model).items()
        }
        save(
            tmp_path / "runs" / name / "step=1.ckpt",
            views,
            common={"model": {"family": "gpt", "config": whole.to_dict()}},
        )
    module = GPTModule(weights=tmp_path / "runs")
    assert module.weights == str(tmp_path / "runs" / "b" / "step=1.ckpt")
    assert module.config == config
    module.configure_model()
    assert all(bool((parameter == 2).all()) for parameter in module.model.parameters())
    assert GPTModule(weights=module.weights).weights == module.weights
    with torch.no_grad():
        assert all(bool((parameter == 2).all()) for parameter in load_model(tmp_path / "runs").parameters())
    with pytest.raises(CheckpointError, match=r"no manifest.*newest finished checkpoint in it is .*runs/b/step=1"):
        checkpoint.open(tmp_path / "runs")


def test_a_folder_that_nobody_may_read_hides_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk has a folder lost+found of its own, which sorts before most runs."""
    (tmp_path / "lost+found").mkdir()
    save(tmp_path / "run" / "a.ckpt", {})
    listed = Path.iterdir

    def guarded(folder: Path) -> Iterator[Path]:
        if folder.name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", guarded)
    assert latest_checkpoint(tmp_path) == tmp_path / "run" / "a.ckpt"


def test_hidden_and_unfinished_checkpoints_do_not_count(tmp_path: Path) -> None:
    hidden = tmp_path / ".lr_find" / "x.ckpt"
    hidden.parent.mkdir()
    hidden.touch()
    (tmp_path / ".lr_find_1.ckpt").touch()
    save(tmp_path / ".lr_find_2.ckpt", {})
    (tmp_path / "step=3.ckpt").mkdir()
    with pytest.raises(CheckpointError, match="no finished checkpoint"):
        resolve("last", "validate", [tmp_path])
    assert resolve("auto", "fit", [tmp_path]) is None


def test_the_log_says_which_checkpoint_was_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("lightning.pytorch").propagate = True
    with caplog.at_level("INFO"):
        resolve("auto", "fit", [tmp_path])
        save(tmp_path / "run" / "a.ckpt", {})
        resolve("auto", "fit", [tmp_path])
        resolve("last", "fit", [tmp_path])
    assert caplog.messages == [
        f"--ckpt_path=auto: there is no finished checkpoint under {tmp_path}; the run starts from scratch",
        f"--ckpt_path=auto: the newest checkpoint is {tmp_path / 'run' / 'a.ckpt'}",
        f"--ckpt_path=last: the newest checkpoint is {tmp_path / 'run' / 'a.ckpt'}",
    ]


@pytest.mark.parametrize("wanted", [None, "best", "runs/step=1.ckpt"])
def test_other_values_stay(wanted: str | None, tmp_path: Path) -> None:
    assert resolve(wanted, "fit", [tmp_path]) == wanted


def test_a_damaged_checkpoint_is_not_picked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor by the ranks that this process starts, which do not verify again."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv(checkpoints.CHOSEN, "")
    for name in ("a", "b"):
        save(tmp_path / f"{name}.ckpt", {}, common={"step": name})
    common = tmp_path / "b.ckpt" / "common.json"
    common.write_bytes(common.read_bytes().replace(b'"b"', b'"c"'))
    logging.getLogger("lightning.pytorch").propagate = True
    with caplog.at_level("INFO"):
        assert resolve("last", "fit", [tmp_path]) == str(tmp_path / "a.ckpt")
    assert "b.ckpt is damaged and is not used: common.json" in caplog.text
    monkeypatch.setenv("LOCAL_RANK", "1")
    chosen = os.environ[checkpoints.CHOSEN].partition(":")[2]
    monkeypatch.setenv(checkpoints.CHOSEN, f"1:{chosen}")
    assert resolve("last", "fit", [tmp_path]) == str(tmp_path / "a.ckpt")
    monkeypatch.setenv(checkpoints.CHOSEN, "")
    assert resolve("last", "fit", [tmp_path]) == str(tmp_path / "b.ckpt")  # a cluster's ranks find out when they load


def test_a_run_that_saved_nothing_is_refused(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"run: this run has saved no finished checkpoint"):
        latest_checkpoint(run)
    (run / "checkpoints" / "last.ckpt").touch()
    assert latest_checkpoint(run) == run / "checkpoints" / "last.ckpt"
