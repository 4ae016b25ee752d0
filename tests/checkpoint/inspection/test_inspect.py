"""The inspector shows what is there, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalight import checkpoint
from megalight.checkpoint.disk.files import CODES
from megalight.checkpoint.inspection import describe, diff, floats, render, to_json, verify
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
    found = torch.from_numpy(floats(raw.numpy(), name))
    assert torch.equal(found.nan_to_num(7e77), expected.nan_to_num(7e77))


def test_inspecting_imports_no_torch(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", x=torch.ones(3))
    code = (
        "import sys; from megalight.checkpoint import latest;"
        "from megalight.checkpoint.inspection import describe, render;"
        "print(render(describe(latest(sys.argv[1]), norms=True))); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "norm 1.73205" in done.stdout


def test_the_same_as_json(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", model__x=torch.full((4,), 2.0))
    found = json.loads(json.dumps(to_json(describe(tmp_path / "a.ckpt", norms=True))))
    assert found["tensors"] == {"model.x": {"shape": [4], "dtype": "float32", "shards": 1, "norm": 4.0}}
    assert (found["format"], found["elements"], found["progress"]["epoch"]) == ("fully_reshardable", 4, 3)


def test_two_checkpoints_are_compared_tensor_by_tensor(tmp_path: Path) -> None:
    weight = torch.randn(5, 3)
    save(tmp_path / "a.ckpt", same=weight, half=weight, changed=weight, gone=weight, wider=weight)
    other = {"same": weight, "half": weight.bfloat16(), "changed": weight * 1.5, "new": weight}
    save(tmp_path / "b.ckpt", **other, wider=torch.randn(5, 4))
    found = {each.name: each for each in diff(tmp_path / "a.ckpt", tmp_path / "b.ckpt")}
    assert found.keys() == {"half", "changed", "gone", "new", "wider"}
    assert found["changed"].relative == pytest.approx(0.5)
    assert str(found["gone"]) == "gone: only in the first ([5, 3] float32)"
    assert str(found["new"]) == "new: only in the second ([5, 3] float32)"
    assert str(found["wider"]) == "wider: [5, 3] float32 and [5, 4] float32"
    assert str(found["half"]).startswith("half: [5, 3] float32 and [5, 3] bfloat16, values differ by 0.00")
    assert diff(tmp_path / "a.ckpt", tmp_path / "a.ckpt") == []


def test_all_damage_is_named(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", first=torch.randn(64), second=torch.randn(64), third=torch.randn(64))
    assert verify(tmp_path / "a.ckpt") == []
    file = tmp_path / "a.ckpt" / "data" / "0-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1  # in the last tensor
    data[-300] ^= 1  # and in the one before
    file.write_bytes(data)
    common = tmp_path / "a.ckpt" / "common.json"
    common.write_bytes(common.read_bytes().replace(b"run", b"fun"))
    found = verify(tmp_path / "a.ckpt")
    assert [(each.file, each.tensor) for each in found] == [
        ("common.json", None),
        ("data/0-0.safetensors", "second"),
        ("data/0-0.safetensors", "third"),
    ]
    assert "third in data/0-0.safetensors: " in str(found[-1])
    (tmp_path / "a.ckpt" / "index.json").unlink()
    assert {each.file for each in verify(tmp_path / "a.ckpt")} == {"common.json", "index.json"}
    (tmp_path / "a.ckpt" / "manifest.json").unlink()
    assert [each.file for each in verify(tmp_path / "a.ckpt")] == ["manifest.json"]
