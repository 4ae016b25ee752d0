"""However the two processes of a run are started, it is the same run, and the caller has its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment

from megalight import checkpoint
from megalight.errors import CheckpointError, ConfigurationError, DataError, LayoutError, MegalightError
from megalight.models.vlm.module import VLMModule
from megalight.strategies import MegatronStrategy, launchers, load_weights
from tests.models.vlm_samples import CONFIG
from tests.strategies import training
from tests.strategies.launched import STEPS
from tests.support.interpreters import environment
from tests.support.workers import free_port

SCRIPT = "tests.strategies.launched"
STARTED = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTEST_CURRENT_TEST")
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "train",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "127.0.0.1",
}


@dataclass
class Run:
    folder: Path
    codes: list[int]
    text: str

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name).read_text())

    def weights(self, name: str) -> dict[str, Any]:
        with np.load(self.folder / name) as arrays:
            return dict(arrays)


def processes(*commands: list[str], environments: list[dict[str, str]] | None = None) -> tuple[list[int], str]:
    """Run commands side by side; their exit codes, and all that they said."""
    clean = {name: value for name, value in environment().items() if name not in STARTED}
    running = [
        subprocess.Popen(
            command,
            env={**clean, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, more in zip(commands, environments or [{}] * len(commands), strict=True)
    ]
    texts = [process.communicate(timeout=240)[0] for process in running]
    return [process.returncode for process in running], "\n".join(texts)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run the script in a way of starting it, once."""

    @cache
    def start(how: str) -> Run:
        folder = tmp_path_factory.mktemp(how)
        words = ["-m", SCRIPT, str(folder), how if how in ("fork", "spawn") else "popen"]
        python = ["python", *words]
        if how == "torchrun":
            code, text = processes([*torchrun(2), *words])
        elif how == "slurm":
            port = str(free_port())
            tasks = [
                {**SLURM, "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "MASTER_PORT": port, **task}
                for task in ({"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2))
            ]
            code, text = processes(python, python, environments=tasks)
        else:
            code, text = processes([*python, "--again"] if how == "fork" else python)
        return Run(folder, code, text)

    return start


def torchrun(count: int) -> list[str]:
    return ["torchrun", "--standalone", "--nproc-per-node", str(count)]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return training.by_hand(training.CONFIGS["gqa"], STEPS)


FULL = {"marks": pytest.mark.full}
WAYS = ["popen", "fork", pytest.param("spawn", **FULL), "torchrun", pytest.param("slurm", **FULL)]
"""Spawned ranks do what forked ones do; that they start is seen on one process."""


@pytest.mark.parametrize("how", WAYS)
def test_every_start_is_the_same_run(started: Any, expected: dict[str, Any], how: str) -> None:
    run = started(how)
    assert set(run.codes) == {0}, run.text
    seen = run.json("run.json")
    assert seen["world_size"] == 2
    assert seen["losses"] == started("popen").json("run.json")["losses"]
    np.testing.assert_allclose(seen["losses"], expected["losses"], rtol=1e-9)
    assert run.json("after.json")["global_step"] == STEPS
    weights = run.weights("weights.npz")
    for name, value in expected["final"].items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-9 * np.linalg.norm(value), err_msg=name)


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", **FULL)])
def test_workers_hand_their_results_back(started: Any, how: str) -> None:
    run = started(how)
    after, reference = run.json("after.json"), started("popen").json("after.json")
    assert after["pid"] != run.json("run.json")["pid"]
    for name in ("global_step", "state", "metrics", "best_score"):
        assert after[name] == reference[name], name
    assert set(after["metrics"]) == {"train_loss", "val_loss", "grad_norm"}
    assert after["best"] == str(run.folder / "checkpoints" / f"step={STEPS}.ckpt")
    assert after["last"] == str(run.folder / "checkpoints" / "last.ckpt")
    gathered, whole = run.weights("weights.npz"), run.weights("whole.npz")
    assert set(gathered) == set(whole)
    for name, value in gathered.items():
        assert value.dtype == whole[name].dtype == np.float64
        assert np.array_equal(value, whole[name]), name


@pytest.mark.parametrize(
    ("how", "part"), [("fork", "."), pytest.param("spawn", ".", **FULL), ("fork", "sharded"), ("fork", "towers")]
)
def test_the_main_process_saves_what_it_was_handed_back(started: Any, how: str, part: str) -> None:
    run = started(how)
    assert run.codes == [0], run.text
    path = run.folder / part / "saved.ckpt"
    assert f"{path} gets the weights and no optimizer state" in run.text
    saved = checkpoint.open(path)
    towers = part == "towers"
    assert saved.common["global_step"] == (1 if towers else STEPS)
    assert not {"optimizer", "unsharded_optimizers", "lr_schedulers"} & saved.common.keys()  # no run may resume without
    if not towers:
        assert saved.file("pid.txt") != str(run.json("after.json")["pid"]).encode()  # a worker has written it
    module = VLMModule(CONFIG) if towers else training.WithData(training.CONFIGS["gqa"])
    load_weights(module, path)
    weights = training.whole(module.model)
    for name, value in run.weights(f"{part}/whole.npz").items():
        assert np.array_equal(weights[name], value), name


def test_a_second_fit_goes_on_from_the_weights_of_the_first(started: Any) -> None:
    run = started("fork")
    first, again = run.json("after.json"), run.json("again/after.json")
    assert run.json("again/run.json")["losses"][0] == pytest.approx(first["metrics"]["val_loss"])  # the same batch
    for name, value in run.weights("again/weights.npz").items():
        assert np.array_equal(value, run.weights("again/whole.npz")[name]), name
    assert again["validated"] == [{"val_loss": again["metrics"]["val_loss"]}]
    assert again["validated"][0]["val_loss"] < first["metrics"]["val_loss"]


def test_one_device_and_several_take_turns_in_a_notebook(started: Any) -> None:
    run = started("fork")
    before = run.json("again/after.json")["metrics"]["val_loss"]
    for name, devices in (("alone", 1), ("grown", 2)):
        seen, after = run.json(f"{name}/run.json"), run.json(f"{name}/after.json")
        assert seen["world_size"] == devices
        assert seen["losses"][0] == pytest.approx(before)  # the same batch
        before = after["metrics"]["val_loss"]


def test_torchrun_with_another_number_of_processes_is_refused_once(tmp_path: Path) -> None:
    codes, text = processes([*torchrun(1), "-m", "megalight", "fit", *CLI, f"--trainer.default_root_dir={tmp_path}"])
    assert codes == [1], text  # torchrun's own
    message = "megalight fit: error: 1 processes were started, but Trainer(devices=2, num_nodes=1) asks for 2."
    assert text.count("error: ") == text.count(message) == 1, text
    assert "torchrun --nproc-per-node 2" in text
    assert not any(tmp_path.iterdir())


CLI = [
    "--model=tests.cli.samples.SampleModule",
    "--model.config={}",
    "--data=tests.cli.samples.SampleData",
    "--trainer.accelerator=cpu",
    "--trainer.devices=2",
    "--trainer.strategy=MegatronStrategy",
]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in STARTED:
        monkeypatch.delenv(name, raising=False)
    for name, value in {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}.items():
        monkeypatch.setenv(name, value)


def quiet(strategy: MegatronStrategy, root: Path, devices: int = 1, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=str(root),
        **options,
    )


@pytest.mark.usefixtures("slurm")
def test_a_slurm_task_trains(tmp_path: Path) -> None:
    trainer = quiet(MegatronStrategy(), tmp_path, plugins=[SLURMEnvironment(auto_requeue=False)])
    module = training.WithData(training.BASE)
    trainer.fit(module)
    assert trainer.global_step == 2
    assert trainer.strategy.cluster_environment.job_id() == 4711


@pytest.mark.usefixtures("slurm")
def test_another_number_of_slurm_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"1 processes were started.*asks for 2.*srun --ntasks-per-node 2"):
        quiet(MegatronStrategy(), tmp_path, devices=2, plugins=[SLURMEnvironment(auto_requeue=False)])


@pytest.mark.parametrize(
    ("options", "devices", "nodes", "words"),
    [
        ({"start_method": "thread"}, 2, 1, "start_method='thread'; choose auto, popen, fork or spawn"),
        ({"start_method": "spawn"}, 2, 2, "num_nodes=2"),
        ({"tensor_parallel": 2}, 1, 1, r"world size 1 is not a multiple of tp x cp x pp = 2"),
        ({"tensor_parallel": 2}, 3, 1, r"world size 3 is not a multiple of tp x cp x pp = 2"),
    ],
)
def test_starts_that_cannot_work_are_refused(
    tmp_path: Path, options: Any, devices: int, nodes: int, words: str
) -> None:
    with pytest.raises((ConfigurationError, LayoutError), match=words):
        quiet(MegatronStrategy(**options), tmp_path, devices, num_nodes=nodes)


def test_the_main_process_ends_when_sigterm_ended_its_forked_ranks() -> None:
    (code,), text = processes(["python", "-m", "tests.strategies.terminated"])
    assert code == 1
    assert "SIGTERM ended the processes of this run" in text
    assert "TrainerStatus.INTERRUPTED" in text


def test_an_interrupt_of_the_main_process_alone_ends_its_forked_ranks() -> None:
    (code,), text = processes(["python", "-m", "tests.strategies.terminated", "interrupt"])
    assert code == 0, text
    assert "workers left: 0" in text
    assert "TrainerStatus.INTERRUPTED" in text
    assert "TrainerStatus.FINISHED" in text


@pytest.mark.parametrize("start", ["popen", "fork", "spawn"])
def test_one_process_starts_nothing_and_suits_a_notebook(tmp_path: Path, start: str) -> None:
    before = {name: os.environ.get(name) for name in STARTED}
    trainer = quiet(MegatronStrategy(start_method=start), tmp_path)
    assert trainer.strategy.launcher.is_interactive_compatible
    trainer.fit(training.WithData(training.BASE))
    assert trainer.global_step == 2
    assert {name: os.environ.get(name) for name in STARTED} == before  # a later Trainer would take itself for a child


def test_re_running_a_notebook_is_not_tried(tmp_path: Path) -> None:
    assert not quiet(
        MegatronStrategy(start_method="popen"), tmp_path, devices=2
    ).strategy.launcher.is_interactive_compatible
    assert quiet(MegatronStrategy(start_method="fork"), tmp_path, devices=2).strategy.launcher.is_interactive_compatible


@pytest.mark.parametrize("start", ["popen", "spawn"])
def test_a_start_that_a_notebook_cannot_do_is_refused_with_one_that_it_can(
    tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalight.strategies.launchers.IS_INTERACTIVE", True)
    with pytest.raises(ConfigurationError, match=f"{start}.*starts 2 processes.*Leave start_method out, which forks"):
        quiet(MegatronStrategy(start_method=start), tmp_path, devices=2)
    assert quiet(MegatronStrategy(start_method=start), tmp_path).strategy.launcher.is_interactive_compatible


class Checked(training.WithData):
    def check_data(self, datamodule: Any) -> None:
        raise DataError(f"no room for {datamodule.rows} rows")

    def check_checkpoint(self, entries: dict[str, Any]) -> None:
        raise CheckpointError(f"at step {entries['global_step']}")


class Rows(pl.LightningDataModule):
    rows = 3


@pytest.mark.parametrize("start", ["popen", "spawn"])
def test_what_can_be_known_is_refused_before_processes_start(
    tmp_path: Path, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was started")

    for kind in (launchers.SubprocessScriptLauncher, launchers.MultiProcessingLauncher):
        monkeypatch.setattr(kind, "launch", never)
    path = tmp_path / "a.ckpt"
    checkpoint.save(path, {}, common={"global_step": 5})
    config = training.BASE
    for module, given, words in (
        (Checked(config), {"datamodule": Rows()}, "no room for 3 rows"),
        (Checked(config), {"ckpt_path": path}, "at step 5"),
        (training.WithData(config), {"ckpt_path": tmp_path / "b.ckpt"}, r"b\.ckpt.*newest finished.*a\.ckpt"),
        (training.WithData(replace(config, hidden_size=36, num_heads=3, num_kv_heads=3)), {}, "tp=2"),
    ):
        trainer = quiet(MegatronStrategy(tensor_parallel=2, start_method=start), tmp_path, devices=2)
        with pytest.raises(MegalightError, match=words):
            trainer.fit(module, **given)
    random = torch.get_rng_state()
    with pytest.raises(AssertionError, match="something was started"):
        trainer.fit(training.WithData(config))
    assert torch.equal(torch.get_rng_state(), random)  # looking has drawn nothing


def test_children_that_hang_are_ended() -> None:
    ending = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(0.1)"])
    launchers.end([ending], grace=240)
    assert ending.wait(0) == 0
    hanging = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    launchers.end([hanging, ending], grace=0.1)
    assert hanging.wait(60) == -9
