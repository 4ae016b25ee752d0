"""The notebook, executed headless: its own cells, then one that looks at what they left."""

from __future__ import annotations

import json
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.source import ROOT

PROBE = """
import json
from megalight.strategies import load_weights
saved = GPTModule(config)
load_weights(saved, trainer.checkpoint_callback.best_model_path)
same = [bool((a == b).all()) for a, b in zip(saved.model.parameters(), module.model.parameters(), strict=True)]
again = pl.Trainer(
    accelerator="cpu", devices=2, strategy=MegatronStrategy(tensor_parallel=2), max_steps=2, limit_val_batches=0,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
before = float(trainer.callback_metrics["val_loss"])
again.fit(module, data)
print(json.dumps({
    "same": same, "step": trainer.global_step, "val_loss": before, "again": again.global_step,
    "next_loss": float(again.callback_metrics["train_loss"]),
}))
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning:zmq", "ignore::DeprecationWarning:jupyter_client")
def test_the_notebook_trains_two_ranks_and_keeps_their_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "clear its outputs"
    notebook.cells.append(nbformat.v4.new_code_cell(PROBE))
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env={**os.environ})
    texts = [
        output["text"]
        for output in notebook.cells[-1]["outputs"]
        if output["output_type"] == "stream" and output["name"] == "stdout"
    ]
    facts = json.loads("".join(texts).strip().splitlines()[-1])
    assert facts["step"] == 40
    assert facts["again"] == 2
    assert all(facts["same"])
    assert facts["val_loss"] < 5.6  # 6.2 untrained
    assert facts["next_loss"] < 5.6  # the second fit began from the first's weights
    completion = notebook.cells[-2]["outputs"][-1]["data"]["text/plain"]
    assert len(completion) > 10
