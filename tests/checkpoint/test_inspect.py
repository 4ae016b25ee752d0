"""The inspector shows what is there, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalight import checkpoint
from megalight.checkpoint.files import CODES
from megalight.checkpoint.inspect import _floats, describe, render
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec


def save(path: Path, **values: torch.Tensor) -> None:
    tensors = {name.replace("__", "."): value for name, value in values.items()}
    specs = {name: ShardSpec.replicated(name, tuple(value.shape)) for name, value in tensors.items()}
    views = checkpoint.views_of_parameters(tensors.items(), specs, ParallelMesh())
    checkpoint.save(path, views, common={"global_step": 12, "epoch": 3, "name": "run", "nested": {"a": 1}, "t": (1,)})


def test_report(tmp_path: Path) -> None:
    weight, bias = torch.randn(3, 5), torch.randn(7, dtype=torch.float64).bfloat16()
    save(tmp_path / "a.ckpt", model__layers__10__weight=weight, model__layers__2__bias=bias)
    report = describe(tmp_path / "a.ckpt", norms=True)
    assert report.numel == 22
    assert report.progress == {"global_step": 12, "epoch": 3, "name": "run"}
    assert report.norms["model.layers.10.weight"] == pytest.approx(weight.double().norm().item(), rel=1e-12)
    assert report.norms["model.layers.2.bias"] == pytest.approx(bias.double().norm().item(), rel=1e-12)
    assert report.nbytes == sum(
        f.stat().st_size for f in (tmp_path / "a.ckpt").rglob("*.*") if f.name != "manifest.json"
    )
    text = render(report)
    assert text.index("  2") < text.index("  10")
    assert "[3, 5]" in text
    assert "bfloat16" in text
    assert "2 tensors, 22 elements" in text
    assert "global_step 12, epoch 3, name run" in text
    assert torch.__version__ in text
    assert "layers  2 tensors, 22 elements, 74 B" in " ".join(render(report, depth=2).split(" ")[:])
    assert describe(tmp_path / "a.ckpt").norms == {}


@pytest.mark.parametrize("name", [name for name in CODES if name != "complex64"])
def test_numbers_of_every_dtype(name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.arange(256, dtype=torch.uint8) if name != "bool" else torch.tensor([0, 1], dtype=torch.uint8)
    expected = raw.view(dtype).double()
    found = torch.from_numpy(_floats(raw.numpy(), name))
    assert torch.equal(found.nan_to_num(7e77), expected.nan_to_num(7e77))


def test_inspecting_imports_no_torch(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", x=torch.ones(3))
    code = (
        "import sys; from megalight.checkpoint import latest;"
        "from megalight.checkpoint.inspect import describe, render;"
        "print(render(describe(latest(sys.argv[1]), norms=True))); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "norm 1.73205" in done.stdout
