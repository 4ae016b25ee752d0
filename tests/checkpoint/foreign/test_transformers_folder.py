"""A folder of ``transformers`` as files: what is in it, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megalight.checkpoint.disk import files as checksum
from megalight.checkpoint.disk.publish import place
from megalight.checkpoint.foreign.transformers_folder import describe, values
from megalight.checkpoint.inspection import render, to_json
from megalight.errors import CheckpointError


def folder(path: Path, *files: dict[str, Tensor]) -> Path:
    """A folder with one file, or several and their index."""
    path.mkdir()
    config = {"model_type": "odd", "architectures": ["OddForCausalLM"], "transformers_version": "5.1.0"}
    (path / "config.json").write_text(json.dumps(config))
    names = [f"model-{number}-of-{len(files)}.safetensors" for number in range(len(files))]
    if len(files) == 1:
        names = ["model.safetensors"]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, path / name)
    if len(files) > 1:
        where = {key: name for name, tensors in zip(names, files, strict=True) for key in tensors}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


def test_names_shapes_dtypes_norms_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = torch.randn(7, 9), torch.randn(7, dtype=torch.float64).bfloat16()
    found = folder(tmp_path / "a", {"layers.10.weight": weight}, {"layers.2.bias": bias, "count": torch.arange(3)})
    monkeypatch.setattr(checksum, "BLOCK", 64)  # a tensor is several blocks
    report = describe(found, norms=True)
    assert report.norms["layers.10.weight"] == pytest.approx(weight.double().norm().item(), rel=1e-12)
    assert report.norms["layers.2.bias"] == pytest.approx(bias.double().norm().item(), rel=1e-12)
    assert np.array_equal(values(place(found), report.tensors["layers.10.weight"])[..., 0], weight.double().numpy())
    assert report.nbytes == sum(file.stat().st_size for file in found.iterdir())
    assert report.progress == {"model_type": "odd", "architecture": "OddForCausalLM"}
    text = render(report)
    assert text.index("  2") < text.index("  10")
    for part in ("[7, 9]", "bfloat16", "3 tensors, 73 elements", "in 4 files", "a folder of transformers", "5.1.0"):
        assert part in text
    assert to_json(describe(found))["tensors"]["count"] == {"shape": [3], "dtype": "int64", "shards": 1}


def test_it_takes_no_torch(tmp_path: Path) -> None:
    folder(tmp_path / "a", {"x": torch.ones(3)})
    code = (
        "import sys; from megalight.cli.main import main; assert main(['inspect', sys.argv[1], '--norms']) == 0;"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True, check=True)
    assert "norm 1.73205" in done.stdout


def test_damage_is_said(tmp_path: Path) -> None:
    twice = folder(tmp_path / "twice", {"x": torch.ones(3)}, {"x": torch.ones(3), "y": torch.ones(1)})
    listed = {"x": "model-0-of-2.safetensors", "y": "model-1-of-2.safetensors"}
    (twice / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(CheckpointError, match=r"holds x twice, in model-0-of-2\.safetensors and model-1-of-2"):
        describe(twice)
    torn = folder(tmp_path / "torn", {"x": torch.ones(300)})
    file = torn / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read as safetensors"):
        describe(torn)
