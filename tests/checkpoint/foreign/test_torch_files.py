"""The format fsdp_dtensor: torch's own DCP reads it without Megalight, and Megalight unpickles nothing of it."""

from __future__ import annotations

import os
import pickle
import random
import re
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from megalight import checkpoint
from megalight.checkpoint import View
from megalight.checkpoint.disk.files import BLOCK, WrittenBox, blocks
from megalight.checkpoint.foreign.torch_dcp import torch_path, write_data
from megalight.checkpoint.inspection import verify
from megalight.errors import CheckpointError
from tests.checkpoint.layouts import SHAPES, STATES, Layout, Model, full
from tests.support.workers import run

SAVED = Layout(4, 2, "optim")
PLAIN = """
import sys, torch, torch.distributed.checkpoint as dcp
state = torch.load(sys.argv[2])
dcp.load(state, checkpoint_id=sys.argv[1])
torch.save(state, sys.argv[2])
assert not any(name.startswith("megalight") for name in sys.modules)
"""


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _views(model: Model) -> dict[str, View]:
    """States go by the weight's name with its prefix, as those of a training run do."""
    return {re.sub(r"^(optimizer\.\w+\.)", r"\1model.", name): view for name, view in model.views().items()}


def _save(path: Path, layout: Layout) -> None:
    checkpoint.save(path, _views(Model(layout, _rank(), filled=True)), common={"step": 3}, scheme="fsdp_dtensor")


def _load(path: Path, layout: Layout) -> list[str]:
    model = Model(layout, _rank(), filled=False)
    checkpoint.open(path).fill(checkpoint.targets_of(_views(model)))
    return model.differs(Model(layout, _rank(), filled=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torch") / "a.ckpt"
    run(_save, SAVED.world, path, SAVED)
    return path


def expected() -> dict[str, dict[str, object]]:
    """The nested state of torch: weights and optimizer state by the parameter's name."""
    states = {name: {state: full(f"optimizer.{state}.{name}") for state in STATES} for name in SHAPES}
    return {"model": {name: full(f"model.{name}") for name in SHAPES}, "optimizer": {"state": states}}


def zeros(state: object) -> object:
    if isinstance(state, dict):
        return {key: zeros(value) for key, value in state.items()}
    assert isinstance(state, torch.Tensor)
    return torch.zeros_like(state)


def test_torch_reads_it_in_a_process_without_megalight(saved: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.pt"
    torch.save(zeros(expected()), state)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLAIN, str(saved), str(state)], cwd=tmp_path, env=environment, text=True
    )
    assert done.returncode == 0
    torch.testing.assert_close(torch.load(state), expected(), rtol=0, atol=0)


def _dtensors(path: Path) -> list[str]:
    """Load into DTensors of another layout than any that saved it: rows are uneven over three ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = expected()["model"]
    split = {name: Shard(0) if SHAPES[name] else Replicate() for name in SHAPES}
    state = {name: distribute_tensor(torch.zeros_like(whole[name]), mesh, [split[name]]) for name in SHAPES}
    dcp.load({"model": state}, checkpoint_id=path)
    assert all(isinstance(tensor, DTensor) for tensor in state.values())
    return [name for name, tensor in state.items() if not torch.equal(tensor.full_tensor(), whole[name])]


def test_torch_reads_it_into_dtensors(saved: Path) -> None:
    assert run(_dtensors, 3, saved) == [[], [], []]


def test_torch_converts_it_to_one_file(saved: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(saved, tmp_path / "one.pt")
    torch.testing.assert_close(torch.load(tmp_path / "one.pt"), expected(), rtol=0, atol=0)


@pytest.mark.parametrize("layout", [Layout(1, 1, "no_shard"), Layout(4, 4, "optim"), Layout(2, 1, "optim")], ids=str)
def test_every_layout_reads_it_without_a_pickle(layout: Layout, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = checkpoint.open(saved)
    assert (opened.scheme, opened.common) == ("fsdp_dtensor", {"step": 3})
    assert run(_load, layout.world, saved, layout) == [[]] * layout.world
    monkeypatch.setattr(pickle, "load", None)
    monkeypatch.setattr(pickle, "Unpickler", None)
    assert _load(saved, Layout(1, 1, "no_shard")) == []


def test_all_bytes_are_verified(tmp_path: Path) -> None:
    """Those around tensors, which only torch reads, too."""
    path = tmp_path / "a.ckpt"
    _save(path, Layout(1, 1, "no_shard"))
    assert verify(path) == []
    files = [file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"]
    assert {file.name for file in files} == {".metadata", "0-0.distcp", "common.json", "index.json"}
    draw = random.Random(1)
    for number in range(60):
        file = files[number % len(files)]
        data = file.read_bytes()
        place = draw.randrange(len(data))
        file.write_bytes(data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :])
        damages = verify(path)
        assert damages, (file, place)
        assert {damage.file for damage in damages} <= {str(file.relative_to(path)), "index.json"}
        file.write_bytes(data)
    index = checkpoint.open(path).tensors["model.embed.word.weight"].chunks[0]
    data = bytearray((path / index.file).read_bytes())
    data[index.start] ^= 1
    (path / index.file).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"0-0\.distcp .*torn.*'model\.embed\.word\.weight'"):
        _load(path, Layout(1, 1, "no_shard"))


def test_blocks_that_share_a_buffer(tmp_path: Path) -> None:
    """As those from a GPU do: a block is good until the next but one is asked for."""
    whole, buffers = torch.arange(BLOCK, dtype=torch.float32), torch.empty(2, BLOCK, dtype=torch.uint8)
    parts = (
        buffers[number % 2][: stop - start].copy_(whole.view(torch.uint8)[start:stop]).numpy().data
        for number, (start, stop) in enumerate(blocks(whole.nbytes))
    )
    piece = WrittenBox("a", tuple(whole.shape), "float32", (0,), tuple(whole.shape))
    _, (info,), _ = write_data(tmp_path, "data/0-0.distcp", [piece], [parts])
    start = info.chunks[0].start
    assert (tmp_path / "data/0-0.distcp").read_bytes()[start : start + whole.nbytes] == whole.numpy().tobytes()


def test_a_tensor_is_held_once(tmp_path: Path) -> None:
    """While its archive is made: a worker of a large model has no room for more."""
    whole = torch.arange(6 * BLOCK // 4, dtype=torch.float32)
    data = memoryview(whole.numpy()).cast("B")
    parts = (data[start:stop] for start, stop in blocks(whole.nbytes))
    piece = WrittenBox("a", tuple(whole.shape), "float32", (0,), tuple(whole.shape))
    write_data(tmp_path, "data/0-0.distcp", [replace(piece, shape=(1,), size=(1,))], [[data[:4]]])  # loads modules
    tracemalloc.start()
    write_data(tmp_path, "data/0-1.distcp", [piece], [parts])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert whole.nbytes < peak < 1.1 * whole.nbytes


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("model.layers.0.mlp.up.weight", ("model", "layers.0.mlp.up.weight")),
        ("optimizer.exp_avg.model.a.weight", ("optimizer", "state", "a.weight", "exp_avg")),
        ("optimizer.master.model.sub.model.weight", ("optimizer", "state", "sub.model.weight", "master")),
        ("ema.model.a", ("ema", "a")),
        ("other", ("other",)),
    ],
)
def test_names_in_torch(name: str, path: tuple[str, ...]) -> None:
    assert torch_path(name) == path
