"""Cached outputs of a frozen model for the samples of a run: a teacher's logits, or a base's hidden states.

A folder holds one record of fixed size for each sample, by its number, so batch size, ranks and resuming do not matter:

* ``samples.bin`` and, with validation samples, ``validation.bin``: the records. Each ends with a hash of the sample's
  tokens and a checksum.
* ``manifest.json``, written last: the facts. A folder without one is not complete.

While it is written, ``begun.json`` holds the facts, and ``*.done`` has a byte for each record that is on disk. Several
processes may write one folder, each its own records, and a process that was killed resumes where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalight.data.blend import Samples
from megalight.data.gpt.dataset import GPTSample
from megalight.errors import DataError
from megalight.types import BaseStates, TokenBatch, TopTokens

MANIFEST, BEGUN, VERSION = "manifest.json", "begun.json", 1
FILES = {"train": "samples.bin", "validation": "validation.bin"}
"""Split -> file of its records."""


@dataclass(frozen=True, kw_only=True)
class RecordsMeta(ABC):
    """Facts about a folder.

    Attributes:
        command: the command that writes such a folder, for messages.
        order: hash of what their order depends on; see :class:`~megalight.data.blend.Samples`.
        sequence_length: tokens ``S`` of a sample.
        tokenizer: identity of the tokenizer of the data; None: unknown.
        validation_order: hash of what their order depends on; None: there are none.
    """

    kind: ClassVar[str]
    command: ClassVar[str]

    samples: int
    order: str
    sequence_length: int
    tokenizer: str | None
    validation_samples: int = 0
    validation_order: str | None = None

    @property
    @abstractmethod
    def fields(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype and shape of each value of a sample."""

    @property
    def record(self) -> np.dtype[Any]:
        """The layout of a sample's record."""
        return np.dtype([*self.fields, ("tokens", "<u8"), ("checksum", "<u4")])

    def count(self, split: str) -> int:
        """Return the number of samples of a split."""
        return self.samples if split == "train" else self.validation_samples

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that have samples."""
        return tuple(split for split in FILES if self.count(split))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the facts from a file.

        Raises:
            DataError: the file cannot be read, or is of another version or kind.
            FileNotFoundError: there is no such file.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            version = values.pop("version")
            # Older folders hold teachers' tokens, and do not say so.
            kind = values.pop("kind", "tokens")
            known = {field.name for field in fields(cls)}
            meta = cls(**values) if kind == cls.kind and values.keys() <= known else None
        except FileNotFoundError:
            raise
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{path} cannot be read ({error}); copy it again, or write the folder again.") from error
        if meta is None or version != VERSION:
            raise DataError(
                f"{path} has version {version} and kind {kind!r}; known here are version {VERSION} and kind "
                f"{cls.kind!r}. Write the folder with {cls.command}."
            )
        return meta

    def write(self, path: Path) -> None:
        """Write the facts to a file, which appears when it is complete."""
        # Of this process alone: others may write the same.
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"version": VERSION, "kind": self.kind, **asdict(self)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


class RecordsWriter:
    """Writes records of a folder, or goes on with one that is not complete.

    Args:
        folder: new, empty, or begun with the same facts.

    Raises:
        DataError: the folder is complete, was begun with other facts, or holds something else.
    """

    def __init__(self, folder: Path, meta: RecordsMeta) -> None:
        self.folder, self.meta = folder, meta
        folder.mkdir(parents=True, exist_ok=True)
        check_begun(folder, meta)
        meta.write(folder / BEGUN)
        self._records: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._fresh: dict[str, list[int]] = {split: [] for split in meta.splits}
        for split in meta.splits:
            # Made in full at once, so that processes write at any place. What is there already stays.
            size = meta.count(split)
            self._records[split] = _open(folder / FILES[split], size * meta.record.itemsize)
            self._done[split] = _open(folder / _done(split), size)

    def __enter__(self) -> RecordsWriter:
        return self

    def missing(self, split: str, part: int = 0, parts: int = 1) -> list[int]:
        """Return the numbers of samples that are not on disk, of one of several equal parts of a split."""
        size = self.meta.count(split)
        first, last = (size * place // parts for place in (part, part + 1))
        done = np.frombuffer(os.pread(self._done[split], last - first, first), np.uint8)
        return (first + np.flatnonzero(done == 0)).tolist()

    def add(self, split: str, index: int, sample: GPTSample, values: Mapping[str, NDArray[Any]]) -> None:
        """Write what the model makes of sample ``index`` of a split."""
        record = np.zeros((), self.meta.record)
        for name, value in values.items():
            record[name] = value
        record["tokens"] = hash_of(sample)
        record["checksum"] = checksum(record)
        _write(self._records[split], record.tobytes(), index * self.meta.record.itemsize)
        self._fresh[split].append(index)

    def commit(self) -> None:
        """Make the records that were added last, and the note that they are there."""
        for split, fresh in self._fresh.items():
            if fresh:
                # The records are on disk before the note says so.
                os.fsync(self._records[split])
                for index in fresh:
                    os.pwrite(self._done[split], b"\1", index)
                fresh.clear()

    def finish(self) -> bool:
        """Write the manifest if all records are there, whoever wrote them. Return whether they are."""
        self.commit()
        if any(self.missing(split) for split in self.meta.splits):
            return False
        self.meta.write(self.folder / MANIFEST)
        for name in (*map(_done, self.meta.splits), BEGUN):
            (self.folder / name).unlink(missing_ok=True)
        return True

    def __exit__(self, *error: object) -> None:
        self.commit()
        for file in (*self._records.values(), *self._done.values()):
            os.close(file)


def check_open(folder: Path) -> None:
    """Refuse a folder that is complete, or that is none.

    Raises:
        DataError: it is.
    """
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; name a folder to write.")
    if (folder / MANIFEST).is_file():
        raise DataError(f"{folder} is complete already; remove it, or name another folder.")


def check_begun(folder: Path, meta: RecordsMeta) -> None:
    """Refuse a folder in which records with these facts cannot be written.

    Raises:
        DataError: see :class:`RecordsWriter`.
    """
    check_open(folder)
    try:
        begun = type(meta).read(folder / BEGUN)
    except FileNotFoundError:
        if folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise DataError(f"{folder} holds other files already; remove it, or name another folder.") from None
        return
    if begun != meta:
        ours, theirs = asdict(meta), asdict(begun)
        names = [f"{name} was {theirs[name]} and is {ours[name]}" for name in ours if ours[name] != theirs[name]]
        raise DataError(
            f"{folder} was begun with other settings: {'; '.join(names)}. Go on with the same ones, or remove it."
        )


MetaT = TypeVar("MetaT", bound=RecordsMeta)
ValueT = TypeVar("ValueT", TopTokens, BaseStates)


class Records(ABC, Generic[MetaT, ValueT]):
    """Reads a folder through memory maps.

    Raises:
        DataError: the folder is missing, incomplete or of another version.
    """

    meta_type: ClassVar[type[RecordsMeta]]
    meta: MetaT

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        command = self.meta_type.command
        check_complete(self.folder, command)
        self.meta = self.meta_type.read(self.folder / MANIFEST)  # type: ignore[assignment]
        self._maps: dict[str, NDArray[Any]] = {}
        for split in self.meta.splits:
            path, wanted = self.folder / FILES[split], self.meta.count(split) * self.meta.record.itemsize
            found = path.stat().st_size if path.is_file() else 0
            if found != wanted:
                raise DataError(
                    f"{path} has {found} bytes, but {self.meta.count(split)} samples take {wanted}: the folder is "
                    f"incomplete. Copy it again, or write it again with {command}."
                )
            self._maps[split] = np.memmap(path, self.meta.record, "r")

    def __reduce__(self) -> tuple[type[Self], tuple[Path]]:
        return type(self), (self.folder,)  # another process maps the files itself; their content is not pickled

    def record(self, split: str, index: int, sample: GPTSample) -> Any:
        """Return the record of sample ``index`` of a split.

        Raises:
            DataError: the record is damaged, or was written for other tokens.
        """
        record, command = self._maps[split][index], self.meta.command
        if record["checksum"] != checksum(record):
            raise DataError(
                f"sample {index} in {self.folder / FILES[split]} is damaged: its checksum differs. Copy the folder "
                f"again, or write it again with {command}."
            )
        if record["tokens"] != hash_of(sample):
            raise DataError(
                f"sample {index} in {self.folder} was written for other tokens or documents than those of the data "
                "now. Use the same data, with the same document_mask and fim, or write the folder again with "
                f"{command}."
            )
        return record

    def has(self, split: str) -> bool:
        """Return whether there are samples of a split."""
        return split in self._maps

    def read(self, index: int, sample: GPTSample, split: str = "train") -> ValueT:
        """Return what the model made of sample ``index``: ``[S, ...]``, as it is stored.

        Raises:
            DataError: the record is damaged, or was written for other tokens.
        """
        return self._of(self.record(split, index, sample))

    def empty(self) -> ValueT:
        """Return the same for a sample without loss."""
        return self._of(np.zeros((), self.meta.record))

    @abstractmethod
    def _of(self, record: Any) -> ValueT:
        """Convert a record."""

    def check(self, samples: Samples[GPTSample], count: int, split: str = "train") -> None:
        """Refuse to serve another run than the folder was written for.

        Args:
            count: how many of them it reads.

        Raises:
            DataError: the order differs, samples are missing, or the first or last one has other tokens.
        """
        stored, command = self.meta.count(split), self.meta.command
        if samples.order != (self.meta.order if split == "train" else self.meta.validation_order):
            raise DataError(
                f"{self.folder} was written for another order of samples: other data, seed, sequence_length, number of "
                f"steps or batch size. Take the settings it was written with, or write it again with {command} for "
                "these."
            )
        if count > stored:
            raise DataError(
                f"{self.folder} holds {stored} samples, and the run reads {count}; write it again with {command} for "
                "this run, or train on fewer."
            )
        for index in (0, count - 1):
            self.record(split, index, samples[index])


def check_complete(folder: Path, command: str) -> None:
    """Check that a folder was written to its end.

    Args:
        command: the command that writes it.

    Raises:
        DataError: it is not there, or not complete.
    """
    if not (folder / MANIFEST).is_file():
        begun = f" It was begun: the same {command} goes on." if (folder / BEGUN).is_file() else ""
        raise DataError(
            f"{folder} has no {MANIFEST}, so it is no complete folder of {command}; write one, and run it to its "
            f"end.{begun}"
        )


def hash_of(sample: GPTSample) -> int:
    """Hash what a model's result depends on."""
    documents = np.asarray(sample.document_lengths or (), np.int64)
    digest = hashlib.blake2b(np.ascontiguousarray(sample.tokens).tobytes(), digest_size=8)
    digest.update(documents.tobytes())
    return int.from_bytes(digest.digest(), "little")


def checksum(record: Any) -> int:
    """Return the checksum of a record."""
    # All but the checksum itself, which is the last field.
    return zlib.crc32(record.tobytes()[: -record.dtype["checksum"].itemsize])


def _done(split: str) -> str:
    return f"{FILES[split]}.done"


def _open(path: Path, size: int) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.truncate(file, size)
    return file


def _write(file: int, content: bytes, offset: int) -> None:
    # The system writes at most 2 GB at a time, and less on a disk that is nearly full.
    rest = memoryview(content)
    while rest:
        written = os.pwrite(file, rest, offset)
        rest, offset = rest[written:], offset + written


def batches_of(missing: Sequence[int], size: int) -> list[Sequence[int]]:
    """Divide numbers of samples into micro-batches."""
    return [missing[start : start + size] for start in range(0, len(missing), size)]


DTYPES = {
    "bfloat16": ("<i2", torch.int16),
    "float16": ("<f2", None),
    "float32": ("<f4", None),
    "float64": ("<f8", None),
}
"""Dtype -> that of the record, and that as which its bits are seen, as NumPy has no bfloat16."""

ENDS = "ends"
"""Name of the checkpoint in the folder."""


@dataclass(frozen=True, kw_only=True)
class HiddenStatesMeta(RecordsMeta):
    """Facts about a folder of hidden states.

    A record holds ``hidden [S, h]`` and ``auxiliary [S, n h]``. The base's ends (its embedding and output layer) lie
    beside them, in the checkpoint ``ends``.

    Attributes:
        hidden_size: ``h``.
        layers: after how many layers the auxiliary hidden states lie, in their order.
    """

    kind: ClassVar[str] = "states"
    command: ClassVar[str] = "megalight hidden-states"

    hidden_size: int
    layers: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.dtype not in DTYPES:
            raise DataError(f"hidden states have the dtype {self.dtype!r}; known are {', '.join(DTYPES)}.")

    @property
    def fields(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """See :attr:`.RecordsMeta.fields`."""
        stored, length, width = DTYPES[self.dtype][0], self.sequence_length, self.hidden_size
        return [("hidden", stored, (length, width)), ("auxiliary", stored, (length, len(self.layers) * width))]


class CachedHiddenStates(Records[HiddenStatesMeta, BaseStates]):
    """Reads a folder of hidden states."""

    meta_type = HiddenStatesMeta

    def _of(self, record: Any) -> BaseStates:
        bits, dtype = DTYPES[self.meta.dtype][1], getattr(torch, self.meta.dtype)
        found = [torch.from_numpy(record[name].copy()) for name in ("hidden", "auxiliary")]
        return BaseStates(*(tensor if bits is None else tensor.view(dtype) for tensor in found))


def hidden_state_values(states: Mapping[str, Tensor], dtype: str) -> dict[str, NDArray[Any]]:
    """Return hidden states as values of a record."""
    bits, kind = DTYPES[dtype][1], getattr(torch, dtype)
    found = {name: tensor.to(kind).cpu().contiguous() for name, tensor in states.items()}
    return {name: (tensor if bits is None else tensor.view(bits)).numpy() for name, tensor in found.items()}


LogitsDtype = Literal["float16", "float32"]
"""Dtypes of log-probabilities on disk."""

LOGS = {"float16": "<f2", "float32": "<f4"}


@dataclass(frozen=True, kw_only=True)
class CachedLogitsMeta(RecordsMeta):
    """Facts about a folder of teacher logits.

    A record holds ids ``[S, K]`` int32, their log-probabilities ``[S, K]``, and the logarithm of the probability of all
    other ids ``[S]`` float32.

    Attributes:
        top_k: ids ``K`` of each token.
        temperature: by which the teacher's logits were divided.
    """

    kind: ClassVar[str] = "tokens"
    command: ClassVar[str] = "megalight cache-logits"

    top_k: int
    vocab_size: int
    temperature: float
    dtype: LogitsDtype

    def __post_init__(self) -> None:
        if self.dtype not in LOGS:
            raise DataError(f"log-probabilities have the dtype {self.dtype!r}; known are {', '.join(LOGS)}.")

    @property
    def fields(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """See :attr:`.RecordsMeta.fields`."""
        size = self.sequence_length, self.top_k
        return [("ids", "<i4", size), ("log_probs", LOGS[self.dtype], size), ("log_rest", "<f4", size[:1])]


class CachedLogits(Records[CachedLogitsMeta, TopTokens]):
    """Reads a folder of teacher logits."""

    meta_type = CachedLogitsMeta

    def _of(self, record: Any) -> TopTokens:
        return TopTokens(*(torch.from_numpy(record[name].copy()) for name in ("ids", "log_probs", "log_rest")))


class CachedOutputDataset(Generic[ValueT]):
    """Samples with what a frozen model made of them.

    Args:
        store: holds all that are read.
        collate: makes a batch of samples.
        split: which split the samples are.
    """

    def __init__(
        self,
        samples: Samples[GPTSample],
        store: Records[Any, ValueT],
        collate: Callable[[Sequence[GPTSample]], TokenBatch],
        split: str = "train",
    ) -> None:
        self.samples, self._collate, self._split = samples, collate, split
        self.store: Records[Any, ValueT] = store

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int | None) -> tuple[GPTSample, ValueT]:
        sample = self.samples[index]
        return sample, self.store.empty() if index is None else self.store.read(index, sample, self._split)

    def collate(self, rows: Sequence[tuple[GPTSample, ValueT]]) -> TokenBatch:
        """Make a batch with :attr:`~megalight.types.TokenBatch.cached_outputs`."""
        batch = self._collate([sample for sample, _ in rows])
        values = [value for _, value in rows]
        return replace(batch, cached_outputs=type(values[0]).stack(values))
