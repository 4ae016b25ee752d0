"""The notebook, executed headless: its own cells, then one that looks at what they left."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import interpreters
from tests.support.source import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

KERNEL = """
from ipykernel import kernelapp
from megalight.strategies import launchers
launchers.IS_INTERACTIVE = True  # Lightning asked when it was imported: PROBE asks again
kernelapp.launch_new_instance()
"""
PROBE = """
import importlib
import json
from lightning.fabric.utilities import imports
from megalight.strategies import load_weights
best = trainer.checkpoint_callback.best_model_path
saved = GPTModule(config)
load_weights(saved, best)
same = [bool((a == b).all()) for a, b in zip(saved.model.parameters(), module.model.parameters(), strict=True)]
# Another cell trains again, from the checkpoint, as two replicas.
resumed = pl.Trainer(
    accelerator="cpu", devices=2, strategy=MegatronStrategy(), max_steps=42, limit_val_batches=0, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
resumed.fit(GPTModule(config, optimizer=AdamConfig(lr=5e-3)), data, ckpt_path=best)
print(json.dumps({
    "interactive": importlib.reload(imports)._IS_INTERACTIVE,
    "same": same,
    "steps": [trainer.global_step, resumed.global_step],
    "losses": [float(trainer.callback_metrics["val_loss"]), float(resumed.callback_metrics["train_loss"])],
}))
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning:zmq", "ignore::DeprecationWarning:jupyter_client")
def test_the_notebook_trains_two_ranks_and_keeps_their_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    forked_kernel(tmp_path, monkeypatch)
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "clear its outputs"
    notebook.cells.append(nbformat.v4.new_code_cell(PROBE))
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="forked", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env={**interpreters.environment(), "IPYTHONDIR": str(tmp_path)})
    facts = json.loads(shown(notebook.cells[-1], "stdout").strip().splitlines()[-1])
    assert facts["interactive"]
    assert all(facts["same"])
    assert facts["steps"] == [40, 42]
    assert max(facts["losses"]) < 5.6  # 6.2 untrained
    completion = notebook.cells[-2]["outputs"][-1]["data"]["text/plain"]
    assert len(completion) > 10
    (fit,) = (cell for cell in notebook.cells if "trainer.fit(" in cell["source"] and "resumed" not in cell["source"])
    assert "139.6 K parameters" in shown(fit, "stdout")
    assert "loss=" in shown(fit, "stdout")  # from a worker
    assert not re.search("Tip:|Warning|already configured", shown(fit))


def forked_kernel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Jupyter know a kernel that is forked from a process with all imports."""
    python = shutil.which("python", path=interpreters.environment()["PATH"])
    spec = {"argv": [python, "-c", KERNEL, "-f", "{connection_file}"], "display_name": "", "language": ""}
    (folder / "kernels" / "forked").mkdir(parents=True)
    (folder / "kernels" / "forked" / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(folder))


def shown(cell: dict[str, Any], *names: str) -> str:
    """What a cell wrote to these streams, or to both."""
    streams = (output for output in cell["outputs"] if output["output_type"] == "stream")
    return "".join(output["text"] for output in streams if not names or output["name"] in names)
