"""An export that is killed at any moment leaves its output absent or whole, and the next one cleans up."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

EXPORT = """
import sys
from megalight.models.hugging_face.export import export
from megalight.models.stored import open_model

model = open_model(sys.argv[1])
print("open", flush=True)
export(model, sys.argv[2], overwrite=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
def test_killed_at_any_moment(seed: int, tmp_path: Path) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=12)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "theirs")
    out = tmp_path / "out"
    words = [sys.executable, "-c", EXPORT, str(tmp_path / "theirs"), str(out)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        time.sleep(random.Random(seed).uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
    if out.exists():
        found = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert all(map(torch.equal, found.parameters(), model.parameters()))
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "theirs"]
    found = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert all(map(torch.equal, found.parameters(), model.parameters()))
