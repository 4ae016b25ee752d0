"""Damage of any kind to any file is detected before anything is used; hostile files are refused."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalight import checkpoint
from megalight.checkpoint.disk import files, index, manifest
from megalight.checkpoint.disk.files import checksum
from megalight.checkpoint.inspection import describe
from megalight.errors import CheckpointError
from tests.checkpoint import simple


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, random.randrange(path.stat().st_size))


def extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0" * random.randint(1, 5000))


def zero(path: Path) -> None:
    data = bytearray(path.read_bytes())
    start = random.randrange(len(data))
    length = random.randint(1, 4096)
    lost = data[start : start + length]
    data[start : start + length] = bytes(len(lost))
    if not any(lost):
        data[0] ^= 255
    path.write_bytes(data)


def delete(path: Path) -> None:
    path.unlink()


def swap(path: Path) -> None:
    data = path.read_bytes()
    middle = random.randrange(1, len(data))
    path.write_bytes(data[middle:] + data[:middle])
    if path.read_bytes() == data:
        flip(path)


def replace(path: Path) -> None:
    path.write_bytes(random.randbytes(path.stat().st_size))


DAMAGES = (flip, truncate, extend, zero, delete, swap, replace)


def use_everything(path: Path) -> None:
    simple.step_of(path)


def damaged(directory: Path, rounds: int, seed: int) -> None:
    random.seed(seed)
    good = directory / "good.ckpt"
    simple.save(good, 1)
    names = [str(file.relative_to(good)) for file in good.rglob("*") if file.is_file()]
    assert len(names) == 8
    bad = directory / "bad.ckpt"
    for number in range(rounds):
        shutil.copytree(good, bad)
        name, damage = names[number % len(names)], random.choice(DAMAGES)
        damage(bad / name)
        values = simple.tensors(-1)
        with pytest.raises(CheckpointError, match=r"newest finished checkpoint beside it is .*good\.ckpt") as error:
            use_everything(bad)
        assert Path(name).name in str(error.value) or "manifest" in str(error.value), (name, damage)
        if name.startswith("data/"):
            with pytest.raises(CheckpointError, match=r"newest finished checkpoint beside it is .*good\.ckpt"):
                checkpoint.open(bad).fill(checkpoint.targets_of(simple.views(values)))
            with pytest.raises(CheckpointError):
                describe(bad, norms=True)
        assert all((value == -1).all() for value in values.values())
        shutil.rmtree(bad)


def test_damage_is_detected_before_use(tmp_path: Path) -> None:
    damaged(tmp_path, 56, 0)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 11))
def test_much_damage_is_detected_before_use(seed: int, tmp_path: Path) -> None:
    """1,000 mutations in all."""
    damaged(tmp_path, 100, seed)


def test_each_single_bit_of_the_manifest_counts(tmp_path: Path) -> None:
    simple.save(tmp_path / "a.ckpt", 1)
    path = tmp_path / "a.ckpt" / manifest.NAME
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :])
        with pytest.raises(CheckpointError, match=r"torn: manifest\.json"):
            manifest.read(path.parent)


def reseal(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """What a forger would do: change the manifest and give it the right checksum again."""
    path = root / manifest.NAME
    content = json.loads(path.read_bytes())
    del content["checksum"]
    change(content)
    body = files.dump_json(content)[1:]
    path.write_bytes((manifest._SEAL % checksum(body)).encode() + body)


def forge(root: Path, name: str, data: bytes) -> None:
    """Replace a file and its record."""
    (root / name).write_bytes(data)
    reseal(root, lambda content: content["files"].update({name: [len(data), checksum(data)]}))


def forge_index(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((root / index.NAME).read_bytes())
    change(content)
    forge(root, index.NAME, files.dump_json(content))


BAD_NAMES = [
    "../b.ckpt/x",
    "/etc/passwd",
    "a/../../x",
    "",
    ".",
    "a//b",
    "a\\..\\b",
    ".hidden",
    "a\0b",
    "a" * 300,
    "C:x",
    "\u202e",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_manifest_names_stay_inside(name: str, tmp_path: Path) -> None:
    simple.save(tmp_path / "a.ckpt", 1)
    reseal(tmp_path / "a.ckpt", lambda content: content["files"].update({name: [3, "0" * 16]}))
    with pytest.raises(CheckpointError, match="file name"):
        checkpoint.open(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="file name"):
        checkpoint.save(tmp_path / "b.ckpt", {}, files={name: b""})
    assert not (tmp_path / "b.ckpt").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["files"].update({"index.json": [-1, "x"]}),
        lambda m: m["files"].update({"index.json": [1 << 80, "x"]}),
        lambda m: m["files"].update({"index.json": ["12", "x"]}),
        lambda m: m["files"].update({"index.json": 5}),
        lambda m: m["files"].pop("index.json"),
        lambda m: m.update(files=[]),
        lambda m: m.update(format="other"),
        lambda m: m.update(version=99),
        lambda m: m.pop("saved_at"),
        lambda m: m.pop("scheme"),
        lambda m: m.update(scheme="dp_reshapable"),
        lambda m: m.update(world_size=1e9),
    ],
)
def test_hostile_manifests(change: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    simple.save(tmp_path / "a.ckpt", 1)
    reseal(tmp_path / "a.ckpt", change)
    with pytest.raises(CheckpointError):
        checkpoint.open(tmp_path / "a.ckpt")
    assert checkpoint.latest(tmp_path) is None or "index.json" not in os.listdir(tmp_path)


def chunk(content: dict[str, Any], name: str = "c.bias") -> dict[str, Any]:
    return content[name]["chunks"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: chunk(i).update(start=-8), "count or size"),
        (lambda i: chunk(i).update(start=chunk(i, "a.weight")["start"] + 4), "overlap in data/0-0"),
        (lambda i: chunk(i).update(offset=[1]), "does not lie inside"),
        (lambda i: chunk(i).update(size=[-1000]), "count or size"),
        (lambda i: chunk(i).update(size=[0]), "does not lie inside"),
        (lambda i: chunk(i).update(size=[999]), "999 of 1000 elements"),
        (lambda i: chunk(i).update(size=[1, 1000]), "does not lie inside"),
        (lambda i: chunk(i).update(file="../../../etc/passwd"), "file name"),
        (lambda i: chunk(i).update(sums=[]), "wrong number of checksums"),
        (lambda i: chunk(i).update(sums=[1]), "malformed"),
        (lambda i: chunk(i).pop("key"), "malformed"),
        (lambda i: i["c.bias"]["chunks"].append({**chunk(i), "start": 10**6}), "overlap at"),
        (lambda i: i["c.bias"].update(shape=[1 << 40, 1 << 40]), "impossible size"),
        (lambda i: i["c.bias"].update(dtype="object"), "unknown dtype"),
        (lambda i: i["c.bias"].update(shape="x"), "list of sizes"),
        (lambda i: i.update({"c.bias": 3}), "malformed"),
    ],
)
def test_hostile_indices(change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path) -> None:
    simple.save(tmp_path / "a.ckpt", 1)
    forge_index(tmp_path / "a.ckpt", change)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.open(tmp_path / "a.ckpt")


@pytest.mark.parametrize("start", [10**6, 10**12, (1 << 62)])
def test_chunks_beyond_their_file(start: int, tmp_path: Path) -> None:
    simple.save(tmp_path / "a.ckpt", 1)
    forge_index(tmp_path / "a.ckpt", lambda content: chunk(content).update(start=start))
    values = simple.tensors(-1)
    with pytest.raises(CheckpointError, match="torn"):
        checkpoint.open(tmp_path / "a.ckpt").fill(checkpoint.targets_of(simple.views(values)))
    assert all((value == -1).all() for value in values.values())


def test_a_chunk_in_a_file_that_the_manifest_does_not_list(tmp_path: Path) -> None:
    simple.save(tmp_path / "a.ckpt", 1)
    shutil.copy(tmp_path / "a.ckpt/data/0-0.safetensors", tmp_path / "a.ckpt/data/9-0.safetensors")
    forge_index(tmp_path / "a.ckpt", lambda content: chunk(content).update(file="data/9-0.safetensors"))
    with pytest.raises(CheckpointError, match="does not list"):
        checkpoint.open(tmp_path / "a.ckpt").fill(checkpoint.targets_of(simple.views(simple.tensors(-1))))


HEADERS = [
    b"",
    struct.pack("<Q", 1 << 63),
    struct.pack("<Q", (100 << 20) + 1) + b"{}",
    struct.pack("<Q", 2) + b"{",
    struct.pack("<Q", 2) + b"[]",
    struct.pack("<Q", 9) + b'{"0": 12}',
    struct.pack("<Q", 5) + b"nope!",
]
TENSORS = [
    {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
    {"dtype": "F32", "shape": [1], "data_offsets": [0, 1 << 62]},
    {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]},
    {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]},
]


@pytest.mark.parametrize(
    "header", HEADERS + [(lambda t: struct.pack("<Q", len(t)) + t)(json.dumps({"0": t}).encode()) for t in TENSORS]
)
def test_hostile_headers(header: bytes, tmp_path: Path) -> None:
    simple.save(tmp_path / "a.ckpt", 1)
    forge(tmp_path / "a.ckpt", "common.safetensors", header + bytes(4))
    with pytest.raises(CheckpointError, match=r"common\.safetensors"):
        _ = checkpoint.open(tmp_path / "a.ckpt").common


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


@pytest.mark.parametrize(
    "text",
    [
        pickle.dumps(Bomb()),
        b"[" * 200_000,
        b'{"$tensor": 7}',
        b'{"$tensor": -9}',
        b'{"$tensor": "0"}',
        b'{"$dtype": "load"}',
        b'{"$dtype": "__builtins__"}',
        b'{"$device": "moon"}',
        b'{"$eval": "1"}',
        b'{"$tuple": 3}',
        b'{"$bytes": "!"}',
        b'{"$dict": [[[1], 2]]}',
        b'{"$tuple": [], "b": 1}',
        b"[1, 2]",
        b"\xff\xfe",
    ],
)
def test_hostile_trees(text: bytes, tmp_path: Path) -> None:
    simple.save(tmp_path / "a.ckpt", 1)
    forge(tmp_path / "a.ckpt", "common.json", text)
    with pytest.raises(CheckpointError):
        _ = checkpoint.open(tmp_path / "a.ckpt").common


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "secret"
    root = tmp_path / "a.ckpt"
    for trick in ("link", "pipe", "folder"):
        simple.save(root, 1)
        target = root / "files" / "tokenizer.json"
        data = target.read_bytes()
        outside.write_bytes(data)
        target.unlink()
        if trick == "link":
            target.symlink_to(outside)
        elif trick == "pipe":
            os.mkfifo(target)
        else:
            target.parent.rmdir()
            (tmp_path / "files").mkdir()
            shutil.copy(outside, tmp_path / "files" / "tokenizer.json")
            target.parent.symlink_to(tmp_path / "files")
        with pytest.raises(CheckpointError, match="no regular file inside it"):
            checkpoint.open(root)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "holds nothing"),
        ({".metadata": b""}, "torch Distributed Checkpoint"),
        ({"config.json": b"{}", "model.safetensors": b""}, "folder of transformers"),
        ({"index.json": b"{}", "data": None}, "never finished"),
        ({"readme": b""}, "It holds readme"),
    ],
)
def test_foreign_folders_are_named(content: dict[str, bytes | None], message: str, tmp_path: Path) -> None:
    simple.save(tmp_path / "good.ckpt", 1)
    folder = tmp_path / "other"
    folder.mkdir()
    for name, data in content.items():
        (folder / name).mkdir() if data is None else (folder / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint.open(folder)
    assert str(tmp_path / "good.ckpt") in str(error.value)


def test_missing_and_single_file_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing is there"):
        checkpoint.open(tmp_path / "a.ckpt")
    (tmp_path / "b.ckpt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"single file\..* resumes from it"):
        checkpoint.open(tmp_path / "b.ckpt")
