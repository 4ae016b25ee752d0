"""Pickles that ask for more memory than they have bytes are refused before anything is made of them."""

from __future__ import annotations

import collections
import contextlib
import io
import pickle
import pickletools
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.checkpoint.foreign import pickles, single_file
from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.eagle.architecture import read_vocabulary

GIB = 1 << 30

BOMBS = {
    "a number of four bytes": (
        b"\x80\x02]r" + struct.pack("<I", GIB) + b".",
        "byte 3 an object gets the number 1073",
    ),
    "a number in digits": (b"\x80\x02]p1073741824\n.", "byte 3 an object gets the number 1073741824"),
    "a number of many digits": (b"\x80\x02]p" + b"9" * 30 + b"\n.", "byte 3 an object gets the number"),
    "a number below zero": (b"]p-5\n.", "gets the number -5"),
    "bytes": (
        b"\x80\x04B" + struct.pack("<I", GIB) + b"x.",
        "byte 2 an object claims 1073741824 bytes, and 2 are",
    ),
    "many bytes": (b"\x80\x04\x8e" + struct.pack("<Q", GIB) + b"x.", "claims 1073741824 bytes"),
    "an array of bytes": (b"\x80\x05\x96" + struct.pack("<Q", GIB) + b"x.", "claims 1073741824 bytes"),
    "text": (b"\x80\x04\x8d" + struct.pack("<Q", GIB) + b"x.", "claims 1073741824 bytes"),
    "a long integer": (b"\x80\x02\x8b" + struct.pack("<i", GIB) + b"x.", "claims 1073741824 bytes"),
    "less than nothing": (b"\x80\x02T" + struct.pack("<i", -5) + b"x.", "claims -5 bytes"),
    "a frame": (b"\x80\x04\x95" + struct.pack("<Q", GIB) + b"].", "byte 2 a frame claims 1073741824 bytes"),
    "no instruction": (b"\x80\x02\xff.", "byte 2 is 255"),
    "no end of a line": (b"cbuiltins\nset", "the line at byte 0 has no end"),
    "no end": (b"\x80\x02]", "ends before its last instruction"),
    "a cut argument": (b"\x80\x04\x8e\x01", "the argument at byte 2 is cut"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_refused_by_name_and_cost_nothing(bomb: str) -> None:
    data, message = BOMBS[bomb]
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=rf"the file is damaged: .*{message}"):
            pickles.read(data, "the file")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_all_that_python_writes_passes(protocol: int) -> None:
    shared = [f"{n}" for n in range(300)]
    value = {
        "text": ("é" * 300, "", "line\nline"),
        "bytes": (b"\x00" * 300, b"", bytearray(b"123" if protocol > 4 else b"")),
        "numbers": [1, -1, 1 << 40, -(1 << 3000), 1.5, float("inf"), True, None],
        "again": [shared, shared],
        "sets": ({1, 2}, frozenset((3,))),
        "ordered": collections.OrderedDict(a=1),
        "large": ["x" * 70_000],
    }
    for data in (pickle.dumps(value, protocol), pickletools.optimize(pickle.dumps(value, protocol))):
        found = pickles.read(data, "x")
        for key in ("text", "numbers", "again", "large"):
            assert found[key] == value[key], key


def test_random_changes_never_pass_what_would_not_fit() -> None:
    """Each change of a byte is refused, or leaves a pickle that takes no more memory than it did."""
    data = pickle.dumps({"a": [b"x" * 9, {"b": 1 << 70}, "y" * 9], "c": list(range(254, 260))}, 4)
    tracemalloc.start()
    try:
        for place in range(len(data)):
            for value in (0, 0x72, 0x7F, 0x8E, 0x95, 0xFF):
                changed = data[:place] + bytes([value]) + data[place + 1 :]
                with contextlib.suppress(CheckpointError):
                    pickles.read(changed, "x")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_every_instruction_is_known() -> None:
    for each in pickletools.opcodes:
        assert ord(each.code) in pickles.SIZES
        argument = pickles.SIZES[ord(each.code)]
        assert argument >= 0 or argument == pickletools.UP_TO_NEWLINE or argument in pickles.LENGTHS, each.name


def archive(instructions: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        made.writestr("a/data.pkl", instructions)
        made.writestr("a/data/0", bytes(16))
        made.writestr("a/version", b"3\n")
    return out.getvalue()


CALLS = {
    "an array of bytes": (
        b"cbuiltins\nbytearray\nJ" + struct.pack("<i", GIB) + b"\x85R",
        "asks for memory: builtins",
    ),
    "one of Python 2": (b"c__builtin__\nbytearray\nJ" + struct.pack("<i", GIB) + b"\x85R", "asks for memory"),
    "a tensor": (b"ctorch\nFloatTensor\nJ" + struct.pack("<i", GIB) + b"\x85R", "asks for memory: torch.FloatTensor"),
    "a new tensor": (b"ctorch\nTensor\nJ" + struct.pack("<i", GIB) + b"\x85\x81", "asks for memory: torch.Tensor"),
    "text that doubles": (b"c_codecs\nencode\nC\x01xX\x03\x00\x00\x00hex\x86R", "encodes text as 'hex'"),
    "a number": (b"]r" + struct.pack("<I", GIB), "gets the number"),
}


@pytest.mark.parametrize("call", CALLS)
def test_archives_that_would_fill_the_memory_are_refused(call: str, tmp_path: Path) -> None:
    """``torch.load(weights_only=True)`` would make the memory that they name."""
    instructions, message = CALLS[call]
    file = tmp_path / "x.pt"
    file.write_bytes(archive(b"\x80\x03" + instructions + b"."))
    with pytest.raises(CheckpointError, match=message):
        single_file.read(file)
    with pytest.raises(ConfigurationError, match=message):
        read_vocabulary(file)


def test_entries_that_claim_more_than_they_have_are_refused(tmp_path: Path) -> None:
    data = archive(b"].")
    # the sizes of an entry in the directory at the end: stored, then real
    place = data.index(b"PK\x01\x02") + 24
    file = tmp_path / "x.ckpt"
    file.write_bytes(data[:place] + struct.pack("<I", GIB) + data[place + 4 :])
    with pytest.raises(CheckpointError, match=r"a/data.pkl claims 1073741824 bytes, and has 2"):
        single_file.read(file)


def test_what_torch_saves_passes(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0))
    marked = torch.ones(2)
    marked.note = "kept"  # type: ignore[attr-defined]
    entries: dict[str, Any] = {
        "state_dict": {"a": parameter, "b": torch.ones(2, 3).T, "c": torch.zeros(0), "d": marked, "e": torch.eye(2)[0]},
        "other": {"bytes": b"\xff\x00", "size": torch.Size([2]), "type": torch.bfloat16, "set": {1}},
    }
    noted = collections.OrderedDict(entries["state_dict"])
    noted._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]  # as modules have it
    entries["state_dict"] = noted
    file = tmp_path / "x.ckpt"
    torch.save(entries, file)
    found = single_file.read(file)
    for name, tensor in entries["state_dict"].items():
        loaded: Tensor = found["state_dict"][name]
        assert torch.equal(loaded, tensor), name
