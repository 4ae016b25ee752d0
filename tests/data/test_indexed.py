from __future__ import annotations

import errno
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalight.data.indexed import IndexedDataset, IndexedWriter, merge, token_dtype
from megalight.errors import DataError
from tests.data.corpora import write


def golden(prefix: Path) -> Path:
    """Three sequences of 3, 2, 4 uint16 tokens in two documents (2 + 1)."""
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_sequences(np.arange(1, 6), [3, 2])
        writer.end_document()
        writer.add_sequences(np.arange(6, 10), [4])
        writer.end_document()
    return prefix


def test_golden_bytes(tmp_path: Path) -> None:
    golden(tmp_path / "a")
    index = (tmp_path / "a.idx").read_bytes()
    expected = bytes.fromhex("4D4D4944494458 0000") + struct.pack("<QBQQ", 1, 8, 3, 3)
    assert len(expected) == 34
    expected += struct.pack("<3i", 3, 2, 4) + struct.pack("<3q", 0, 6, 10) + struct.pack("<3q", 0, 2, 3)
    assert len(index) == 94
    assert index == expected
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<9H", *range(1, 10))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_read(tmp_path: Path) -> None:
    data = IndexedDataset(golden(tmp_path / "a"))
    assert (len(data), data.num_documents, data.num_tokens, data.dtype) == (3, 2, 9, np.uint16)
    assert [data[i].tolist() for i in range(3)] == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert data.get(2, 1, 2).tolist() == [7, 8]
    assert data.get(2, 4).tolist() == []
    assert np.shares_memory(data[1], data.tokens)
    for offset, length in ((0, 5), (-1, 2), (3, 2), (5, None)):
        with pytest.raises(IndexError):
            data.get(2, offset, length)


def test_pickle_carries_the_path_alone(tmp_path: Path) -> None:
    data = write(tmp_path / "a", [50_000])
    blob = pickle.dumps(data)
    assert len(blob) < 1000
    again = pickle.loads(blob)
    assert np.array_equal(again.tokens, data.tokens)


@pytest.mark.parametrize(("vocab", "dtype"), [(65499, "uint16"), (65500, "int32"), (200_000, "int32")])
def test_token_dtype(vocab: int, dtype: str) -> None:
    assert token_dtype(vocab) == np.dtype(dtype)


def test_merge(tmp_path: Path) -> None:
    golden(tmp_path / "a")
    write(tmp_path / "b", [2, 0, 3], first=100)
    merged = merge([tmp_path / "a", tmp_path / "b", tmp_path / "a"], tmp_path / "c")
    assert merged.lengths.tolist() == [3, 2, 4, 2, 0, 3, 3, 2, 4]
    assert merged.documents.tolist() == [0, 2, 3, 4, 5, 6, 8, 9]
    assert merged.starts.tolist() == [0, 3, 5, 9, 11, 11, 14, 17, 19]
    assert merged.tokens.tolist() == [*range(1, 10), *range(100, 105), *range(1, 10)]
    write(tmp_path / "d", [1], "int32")
    with pytest.raises(DataError, match="only files of one dtype"):
        merge([tmp_path / "a", tmp_path / "d"], tmp_path / "e")
    assert not list(tmp_path.glob("e*"))
    with pytest.raises(DataError, match="nothing to merge"):
        merge([], tmp_path / "e")


def test_modes(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", "uint8") as writer:
        writer.add_sequences(np.arange(3), [3])
        writer.add_sequences(np.arange(2), [2], mode=1)
        writer.end_document()
    modes = IndexedDataset(tmp_path / "a").modes
    assert modes is not None
    assert modes.tolist() == [0, 1]
    assert (tmp_path / "a.idx").stat().st_size == 34 + 2 * 12 + 2 * 8 + 2


@settings(max_examples=30)
@given(
    documents=st.lists(st.lists(st.integers(0, 6), max_size=4), max_size=6),
    dtype=st.sampled_from(["uint8", "int8", "int16", "int32", "int64", "float32", "float64", "uint16"]),
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], dtype: str) -> None:
    prefix = tmp_path_factory.mktemp("indexed") / "x.y"  # a dot in the name is part of it
    generator = np.random.default_rng(0)
    flat = [generator.integers(0, 100, length) for document in documents for length in document]
    sequences = iter(flat)
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            for length in document:
                writer.add_sequences(next(sequences), [length])
            writer.end_document()
    data = IndexedDataset(prefix)
    assert data.num_documents == len(documents)
    assert np.diff(data.documents).tolist() == [len(document) for document in documents]
    assert [data[i].tolist() for i in range(len(data))] == [tokens.tolist() for tokens in flat]


def test_damaged_files_are_named(tmp_path: Path) -> None:
    golden(tmp_path / "a")
    index, tokens = (tmp_path / "a.idx").read_bytes(), (tmp_path / "a.bin").read_bytes()
    huge = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 1 << 60, 3)
    negative = index[:34] + struct.pack("<3i", 3, -2, 8) + index[46:]
    unordered = index[:70] + struct.pack("<3q", 0, 9, 3)
    shifted = index[:46] + struct.pack("<3q", 0, 4, 10) + index[70:]
    cases = [
        (index[:20], tokens, "a.idx has 20 bytes"),
        (b"", tokens, "a.idx has 0 bytes"),
        (b"X" + index[1:], tokens, "not an index file"),
        (index[:9] + b"\x02" + index[10:], tokens, "version 2"),
        (index[:17] + b"\x63" + index[18:], tokens, "dtype code 99"),
        (index[:-5], tokens, "the file is incomplete"),
        (huge, tokens, "the file is incomplete"),
        (negative, tokens, "sequence length of -2"),
        (shifted, tokens, "are not the sums of the lengths"),
        (unordered, tokens, "must increase from 0 to 3"),
        (index, tokens[:-2], "a.bin has 16 bytes, but its index describes 18"),
        (index, tokens + b"\0\0", "a.bin has 20 bytes"),
    ]
    for bad_index, bad_tokens, message in cases:
        (tmp_path / "a.idx").write_bytes(bad_index)
        (tmp_path / "a.bin").write_bytes(bad_tokens)
        with pytest.raises(DataError, match=message):
            IndexedDataset(tmp_path / "a")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DataError, match=r"a\.bin does not exist.*megalight prepare"):
        IndexedDataset(tmp_path / "a")


def test_a_folder_and_a_file_beside_are_no_prefix(tmp_path: Path) -> None:
    for name in ("b", "a", "a.loss"):
        golden(tmp_path / name)
    (tmp_path / "a.json").touch()
    with pytest.raises(DataError, match=rf"It is a folder; give a prefix in it: {tmp_path}/a, {tmp_path}/b\.$"):
        IndexedDataset(tmp_path)
    with pytest.raises(DataError, match=rf"Give the prefix '{tmp_path}/a'\.$"):
        IndexedDataset(tmp_path / "a.json")


def test_files_and_folders_that_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden(tmp_path / "a")
    with pytest.raises(DataError, match=r"b\.bin cannot be written \(File exists\); choose an output in another"):
        IndexedWriter(tmp_path / "a.bin" / "b", np.uint16)

    def closed(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "a.bin")

    monkeypatch.setattr("megalight.data.indexed._map", closed)
    with pytest.raises(DataError, match=r"data prefix '.*a' cannot be read \(.*Permission denied: 'a\.bin'\)"):
        IndexedDataset(tmp_path / "a")


def test_an_address_is_no_prefix() -> None:
    with pytest.raises(DataError, match=r"'s3://bucket/a' is an address; .* copy them to this machine, or mount"):
        IndexedDataset("s3://bucket/a")


def test_a_failed_write_leaves_the_old_pair(tmp_path: Path) -> None:
    golden(tmp_path / "a")
    before = (tmp_path / "a.idx").read_bytes()
    with pytest.raises(DataError, match="do not fit"), IndexedWriter(tmp_path / "a", "uint8") as writer:
        writer.add_documents(np.arange(300), [300])
    assert (tmp_path / "a.idx").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_bad_writes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not in the format"):
        IndexedWriter(tmp_path / "a", "uint32")
    writer = IndexedWriter(tmp_path / "a", "uint8")
    with pytest.raises(DataError, match="0 to 256 do not fit uint8"):
        writer.add_documents(np.array([0, 256]), [2])
    with pytest.raises(DataError, match="lengths sum to 3, but 2 tokens"):
        writer.add_documents(np.array([0, 1]), [3])
    writer.discard()
    assert not list(tmp_path.iterdir())
