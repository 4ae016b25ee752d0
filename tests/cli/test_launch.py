"""The console program as users start it: it launches the other ranks itself."""

import os
import subprocess
import sys

import pytest
import yaml

COMMAND = [
    sys.executable,
    "-m",
    "megalight",
    "fit",
    "--model=tests.cli.samples.SampleModule",
    "--trainer.strategy=MegatronStrategy",
    "--trainer.accelerator=cpu",
    "--trainer.devices=2",
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=0",
    "--trainer.enable_checkpointing=false",
    "--trainer.log_every_n_steps=1",
]


def start(folder, *words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*COMMAND, f"--trainer.default_root_dir={folder}", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


@pytest.mark.full
def test_two_ranks_train(tmp_path):
    done = start(tmp_path, "--data=tests.cli.samples.SampleData")
    assert done.returncode == 0, done.stderr
    assert "step 2/2  loss" in done.stdout
    record = yaml.safe_load((tmp_path / "lightning_logs/version_0/run.yaml").read_text())
    assert record["layout"] == "2 ranks: dp2"


@pytest.mark.full
def test_an_error_of_all_ranks_is_told_once(tmp_path):
    done = start(tmp_path, "--data=tests.cli.samples.TornData")
    assert done.returncode == 2
    assert done.stderr.count("samples.bin is torn") == 1
    assert "Traceback" not in done.stderr
