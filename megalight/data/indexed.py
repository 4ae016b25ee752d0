"""Token files in the format of Megatron-LM: ``<prefix>.bin`` (token ids end to end) and ``<prefix>.idx`` (the index).

Layout of the ``.idx`` file, little endian: 9 bytes ``MMIDIDX\\0\\0``; u64 version 1; u8 dtype code; u64 number of
sequences ``S``; u64 entries ``D`` of the document array; i32 lengths ``[S]``; i64 byte offsets ``[S]``; i64 document
array ``[D]`` (the sequence at which each document starts; the first entry is 0, the last ``S``); optionally i8 modes
``[S]`` (multimodal data).
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megalight.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype that Megatron-LM chooses: uint16 for vocabularies below 65500, else int32."""
    # The limit is Megatron-LM's, and leaves a few ids free below 65536.
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def paths(prefix: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Return the ``.bin`` and ``.idx`` paths of ``prefix``. The prefix may end with either suffix."""
    name = os.fspath(prefix)
    if name.endswith((".bin", ".idx")):
        name = name[:-4]
    return Path(name + ".bin"), Path(name + ".idx")


COMMAND = "megalight prepare INPUT --output"


def _suggestion(prefix: str) -> str:
    """Return what to give instead of a prefix: those in the folder of this name, or that of a file of this name."""
    if os.path.isdir(prefix):
        held = sorted(each.removesuffix(".idx") for each in os.listdir(prefix) if each.endswith(".idx"))
        # Those of loss masks and images belong to one of the others.
        own = [each for each in held if not each.endswith((".loss", ".images"))]
        if own:
            return f"It is a folder; give a prefix in it: {', '.join(os.path.join(prefix, each) for each in own[:5])}."
    shorter = os.path.splitext(prefix)[0]
    return f"Give the prefix {shorter!r}." if os.path.isfile(prefix) and os.path.isfile(f"{shorter}.idx") else ""


def _map(path: Path) -> memoryview | mmap.mmap:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:  # an empty file cannot be mapped
            return memoryview(b"")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class IndexedDataset:
    """Sequences of tokens in a pair of files, read through memory maps. Opening reads the index only.

    Opening checks that the two files belong together, so an incomplete copy is found before training.

    Attributes:
        prefix: path without ``.bin`` / ``.idx``.
        dtype: dtype of the token ids on disk.
        tokens: ``[num_tokens]``: all tokens of the ``.bin`` file, mapped.
        lengths: ``[S]`` int32: number of tokens of each sequence.
        starts: ``[S]`` int64: start of each sequence in ``tokens``.
        documents: ``[D]`` int64: the sequence at which each document starts, then ``S``.
        modes: ``[S]`` int8 for multimodal files, else None.

    Raises:
        DataError: a file is missing or incomplete, has another format or version, or the two files do not belong
            together.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        bin_path, idx_path = paths(prefix)
        self.prefix = os.fspath(bin_path)[:-4]
        if "://" in os.fspath(prefix):
            raise DataError(
                f"data prefix {os.fspath(prefix)!r} is an address; token files are mapped into memory, so copy them to "
                "this machine, or mount the store, and give the path."
            )
        try:
            self._open(bin_path, idx_path)
        except OSError as error:
            raise DataError(f"data prefix {self.prefix!r} cannot be read ({error}).") from error

    def _open(self, bin_path: Path, idx_path: Path) -> None:
        for path in (bin_path, idx_path):
            if not path.is_file():
                raise DataError(
                    f"{path} does not exist; the data prefix {self.prefix!r} needs both {bin_path.name} and "
                    f"{idx_path.name}. " + (_suggestion(self.prefix) or f"Create them with: {COMMAND} {self.prefix}")
                )
        self._read_index(idx_path, bin_path.stat().st_size)
        self.tokens: NDArray[Any] = np.frombuffer(_map(bin_path), dtype=self.dtype)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return type(self), (self.prefix,)  # another process maps the files itself; their content is not pickled

    def _read_index(self, path: Path, bin_size: int) -> None:
        buffer = _map(path)
        again = "Write or copy both files again."
        if len(buffer) < HEADER.size:
            raise DataError(f"{path} has {len(buffer)} bytes, but an index has at least {HEADER.size}. {again}")
        magic, version, code, num_sequences, num_documents = HEADER.unpack_from(buffer)
        if magic != MAGIC:
            raise DataError(f"{path} is not an index file: it starts with {magic!r}; an index starts with {MAGIC!r}.")
        if version != VERSION:
            raise DataError(f"{path} has version {version}; only version {VERSION} can be read.")
        if code not in DTYPES:
            raise DataError(f"{path} has dtype code {code}; known codes are {sorted(DTYPES)}. {again}")
        self.dtype = DTYPES[code]
        size = HEADER.size + 12 * num_sequences + 8 * num_documents
        # The modes are optional, so two sizes are right.
        if len(buffer) not in (size, size + num_sequences):
            raise DataError(
                f"{path} has {len(buffer)} bytes, but {num_sequences} sequences and {num_documents} document entries "
                f"take {size}: the file is incomplete. {again}"
            )
        offset = HEADER.size
        self.lengths: NDArray[np.int32] = np.frombuffer(buffer, "<i4", num_sequences, offset)
        offset += self.lengths.nbytes
        byte_offsets = np.frombuffer(buffer, "<i8", num_sequences, offset)
        offset += byte_offsets.nbytes
        self.documents: NDArray[np.int64] = np.frombuffer(buffer, "<i8", num_documents, offset)
        offset += self.documents.nbytes
        self.modes: NDArray[np.int8] | None = None
        if len(buffer) > size:
            self.modes = np.frombuffer(buffer, "<i1", num_sequences, offset)
        self.starts: NDArray[np.int64] = byte_offsets // self.dtype.itemsize
        self._check(path, byte_offsets, bin_size, again)

    def _check(self, path: Path, byte_offsets: NDArray[np.int64], bin_size: int, again: str) -> None:
        if len(self) and int(self.lengths.min()) < 0:
            raise DataError(f"{path} has a sequence length of {int(self.lengths.min())}; lengths are >= 0. {again}")
        # int64: the bytes of all sequences exceed 32 bits. The lengths are int32.
        ends = np.cumsum(self.lengths, dtype=np.int64) * self.dtype.itemsize
        total = int(ends[-1]) if len(self) else 0
        if len(self) and (byte_offsets[0] != 0 or not np.array_equal(byte_offsets[1:], ends[:-1])):
            raise DataError(f"{path} is damaged: the sequence offsets are not the sums of the lengths. {again}")
        if total != bin_size:
            raise DataError(
                f"{self.prefix}.bin has {bin_size} bytes, but its index describes {total}: one of the two files is "
                f"incomplete or belongs to another data set. {again}"
            )
        bounds = self.documents
        if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != len(self) or (np.diff(bounds) < 0).any():
            raise DataError(
                f"{path} is damaged: the document array must increase from 0 to {len(self)}, the number of sequences. "
                f"{again}"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Number of documents. Each is one or more sequences."""
        return len(self.documents) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return tokens ``[offset, offset + length)`` of a sequence (by default to its end): a view, not a copy.

        Raises:
            IndexError: there is no such sequence, or it has no such tokens.
        """
        size = int(self.lengths[index])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(f"tokens {offset} to {stop} of sequence {index}, which has {size}.")
        start = int(self.starts[index])
        # A view: the sample copies it when it converts the ids.
        return self.tokens[start + offset : start + stop]


class IndexedWriter:
    """Writes a pair of token files.

    The files have temporary names until :meth:`close`, so a reader never sees half a data set. As a context manager,
    the writer closes on success and removes its files on an exception.

    Args:
        prefix: path without ``.bin`` / ``.idx``. Its folder is created.
        dtype: dtype of the token ids; see :func:`token_dtype`.

    Raises:
        DataError: the format has no such dtype, or the folder cannot be written.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            raise DataError(f"dtype {np.dtype(dtype)} is not in the format; use one of {[str(d) for d in CODES]}.")
        self._bin, self._idx = paths(prefix)
        self._temporary = [path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in (self._bin, self._idx)]
        try:
            self._bin.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(self._temporary[0], "wb")  # noqa: SIM115  closed by close() or discard()
        except OSError as error:
            raise DataError(
                f"{self._bin} cannot be written ({error.strerror}); choose an output in another folder."
            ) from error
        self._lengths: list[NDArray[np.int32]] = []
        self._documents: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self._modes: list[NDArray[np.int8]] = []
        self._num_sequences = 0

    def add_sequences(self, tokens: NDArray[Any], lengths: NDArray[Any] | Iterable[int], mode: int = 0) -> None:
        """Append sequences to the current document; ``tokens`` holds them end to end.

        Raises:
            DataError: the dtype of the file cannot hold a token id, or the lengths do not sum to ``len(tokens)``.
        """
        sizes = np.asarray(lengths if isinstance(lengths, np.ndarray) else list(lengths), dtype=np.int32)
        if int(sizes.sum(dtype=np.int64)) != len(tokens):
            raise DataError(f"lengths sum to {int(sizes.sum(dtype=np.int64))}, but {len(tokens)} tokens were given.")
        # In the file's own dtype no id can be too large.
        if self.dtype.kind in "iu" and len(tokens) and tokens.dtype != self.dtype:
            info = np.iinfo(self.dtype)
            low, high = int(tokens.min()), int(tokens.max())
            if low < info.min or high > info.max:
                raise DataError(f"token ids {low} to {high} do not fit {self.dtype} ({info.min} to {info.max}).")
        self._file.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self._lengths.append(sizes)
        self._modes.append(np.full(len(sizes), mode, np.int8))
        self._num_sequences += len(sizes)

    def end_document(self) -> None:
        """End the current document. Later sequences belong to the next one."""
        self._documents.append(np.array([self._num_sequences], np.int64))

    def add_documents(
        self, tokens: NDArray[Any], lengths: NDArray[Any] | Iterable[int], counts: Sequence[int] | None = None
    ) -> None:
        """Append whole documents.

        Args:
            tokens: the tokens of all documents, end to end.
            lengths: number of tokens of each sequence.
            counts: number of sequences of each document. None: each sequence is a document, as in GPT data.

        Raises:
            DataError: as in :meth:`add_sequences`, or the counts do not sum to the number of sequences.
        """
        lengths = lengths if isinstance(lengths, np.ndarray) else list(lengths)
        sizes = np.ones(len(lengths), np.int64) if counts is None else np.asarray(counts, np.int64)
        if int(sizes.sum()) != len(lengths):
            raise DataError(f"counts sum to {int(sizes.sum())} sequences, but {len(lengths)} sequences were given.")
        before = self._num_sequences
        self.add_sequences(tokens, lengths)
        self._documents.append(before + np.cumsum(sizes))

    def add_index(self, prefix: str | os.PathLike[str]) -> None:
        """Append another pair of files as a whole.

        Raises:
            DataError: it has another dtype.
        """
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise DataError(
                f"{other.prefix} holds {other.dtype}, but this file holds {self.dtype}; only files of one dtype can "
                "be merged. Prepare one of them again with the other's tokenizer."
            )
        with open(paths(prefix)[0], "rb") as source:
            # As bytes, in large blocks: the ids need no conversion, because dtypes are equal.
            shutil.copyfileobj(source, self._file, 16 << 20)
        self._lengths.append(other.lengths)
        # Without its first 0: that document begins where the last one ended.
        self._documents.append(other.documents[1:] + self._num_sequences)
        self._modes.append(np.zeros(len(other), np.int8) if other.modes is None else other.modes)
        self._num_sequences += len(other)

    def close(self) -> None:
        """Write the index and publish both files. They replace an older pair of this name."""
        self._file.flush()
        # On disk before it has its name: after a crash, the file is whole or not there.
        os.fsync(self._file.fileno())
        self._file.close()
        lengths = np.concatenate([np.zeros(0, np.int32), *self._lengths])
        documents = np.concatenate(self._documents)
        modes = np.concatenate([np.zeros(0, np.int8), *self._modes])
        offsets = np.zeros(len(lengths), np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
        offsets *= self.dtype.itemsize
        with open(self._temporary[1], "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(lengths), len(documents)))
            for array in (lengths.astype("<i4"), offsets.astype("<i8"), documents.astype("<i8")):
                file.write(array.data)
            # Text has mode 0 alone, and Megatron-LM then writes none.
            if modes.any():
                file.write(modes.data)
            file.flush()
            os.fsync(file.fileno())
        self._idx.unlink(missing_ok=True)  # before the new tokens appear: an old index must not be read with them
        os.replace(self._temporary[0], self._bin)
        os.replace(self._temporary[1], self._idx)

    def discard(self) -> None:
        """Remove the temporary files. An older pair of this name stays."""
        self._file.close()
        for path in self._temporary:
            path.unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return self.discard()
        try:
            self.close()
        except BaseException:
            self.discard()
            raise


def merge(prefixes: Iterable[str | os.PathLike[str]], output: str | os.PathLike[str]) -> IndexedDataset:
    """Concatenate data sets of one dtype, in the given order, into ``output``.

    Raises:
        DataError: there is no input, or the inputs have different dtypes.
    """
    inputs = list(prefixes)
    if not inputs:
        raise DataError("nothing to merge: give at least one data prefix.")
    with IndexedWriter(output, IndexedDataset(inputs[0]).dtype) as writer:
        for prefix in inputs:
            writer.add_index(prefix)
    return IndexedDataset(output)
