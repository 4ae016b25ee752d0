"""The console program as users start it: it launches the other ranks itself."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
import yaml

from megalight.data.indexed import IndexedWriter
from tests.parallel.tiny_transformers import tiny

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


@pytest.mark.full
def test_a_model_of_transformers_trains_by_its_name_and_becomes_a_folder(tmp_path):
    before = tiny("qwen3").float()
    before.save_pretrained(tmp_path / "model")
    with IndexedWriter(tmp_path / "data", "uint16") as writer:
        for first in range(3, 60):
            writer.add_sequences(np.arange(first, first + 30) % 96, [30])
            writer.end_document()
    words = [
        "--model=HFCausalLM",
        f"--model.weights={tmp_path / 'model'}",
        "--data=GPTDataModule",
        f"--data.data={tmp_path / 'data'}",
        "--data.sequence_length=16",
        "--data.global_batch_size=4",
        "--trainer.strategy.tensor_parallel=2",
        f"--export_hf={tmp_path / 'out'}",
    ]
    done = start(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert after.keys() == before.state_dict().keys()
    assert all(not torch.equal(after[name].float(), p) for name, p in before.named_parameters())
