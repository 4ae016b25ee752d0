"""What a teacher predicts for the samples of a training run, on disk: ``samples.bin`` and ``manifest.json``.

``samples.bin`` has one record of fixed size for each sample, by its number in the data set. So batch size, ranks and
resuming do not matter. A record holds ids ``[S, K]`` int32, their log-probabilities ``[S, K]``, the logarithm of the
probability of all other ids ``[S]`` float32, a hash of the sample's tokens, and a checksum. The manifest is written
last: a folder without one is not complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalight.data.blend import Samples
from megalight.data.gpt.dataset import Sample
from megalight.errors import DataError
from megalight.types import TokenBatch, TopTokens

MANIFEST, RECORDS, VERSION = "manifest.json", "samples.bin", 1

Stored = Literal["float16", "float32"]
"""Dtypes of log-probabilities on disk."""


@dataclass(frozen=True, kw_only=True)
class TaughtMeta:
    """Facts about a store.

    Attributes:
        samples: number of samples.
        order: hash of what the order of samples depends on; see :class:`~megalight.data.blend.Samples`.
        sequence_length: tokens ``S`` of a sample.
        top_k: ids ``K`` of each token.
        vocab_size: of the teacher.
        temperature: by which the teacher's logits were divided.
        dtype: of the log-probabilities.
        tokenizer: identity of the tokenizer of the data; None: unknown.
    """

    samples: int
    order: str
    sequence_length: int
    top_k: int
    vocab_size: int
    temperature: float
    dtype: Stored
    tokenizer: str | None

    @property
    def record(self) -> np.dtype[Any]:
        """The layout of a sample's record."""
        size = self.sequence_length, self.top_k
        logs = {"float16": "<f2", "float32": "<f4"}[self.dtype]
        fields = [("ids", "<i4", size), ("log_probs", logs, size), ("log_rest", "<f4", size[:1])]
        return np.dtype([*fields, ("tokens", "<u8"), ("checksum", "<u4")])


class TaughtWriter:
    """Writes a store, sample by sample in order. It is complete when the block ends without an error.

    Args:
        folder: new or empty.
        meta: the facts.
    """

    def __init__(self, folder: Path, meta: TaughtMeta) -> None:
        self.folder, self.meta = folder, meta
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / RECORDS, "wb")  # noqa: SIM115  closed in __exit__

    def __enter__(self) -> TaughtWriter:
        return self

    def add(self, sample: Sample, taught: TopTokens) -> None:
        """Append what the teacher predicts for the next sample, ``[S]``."""
        record = np.zeros((), self.meta.record)
        for name in ("ids", "log_probs", "log_rest"):
            record[name] = getattr(taught, name).numpy()
        record["tokens"] = _hash(sample)
        record["checksum"] = _checksum(record)
        self._file.write(record.tobytes())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The records are on disk before the manifest says so.
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if error is None:
            temporary = self.folder / f"{MANIFEST}.partial"
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump({"version": VERSION, **asdict(self.meta)}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.folder / MANIFEST)


class TaughtStore:
    """Reads a store through a memory map.

    Attributes:
        meta: the facts.

    Raises:
        DataError: the store is missing, incomplete or of another version.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.meta = self._read()
        path, wanted = self.folder / RECORDS, self.meta.samples * self.meta.record.itemsize
        found = path.stat().st_size if path.is_file() else 0
        if found != wanted:
            raise DataError(
                f"{path} has {found} bytes, but {self.meta.samples} samples take {wanted}: the store is incomplete. "
                "Copy it again, or write it again with megalight teach."
            )
        self._records: NDArray[Any] = np.memmap(path, self.meta.record, "r")

    def __reduce__(self) -> tuple[type[TaughtStore], tuple[Path]]:
        return type(self), (self.folder,)  # another process maps the file itself; its content is not pickled

    def _read(self) -> TaughtMeta:
        path = self.folder / MANIFEST
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            version = values.pop("version")
            meta = TaughtMeta(**values)
        except FileNotFoundError as error:
            raise DataError(
                f"{self.folder} has no {MANIFEST}, so it is no complete store of a teacher's predictions. Write one "
                "with: megalight teach TEACHER --top-k K --output FOLDER -- -c RECIPE"
            ) from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{path} cannot be read ({error}); copy it again, or write the store again.") from error
        if version != VERSION or meta.dtype not in get_args(Stored):
            raise DataError(
                f"{path} has version {version} and dtype {meta.dtype!r}; known are version {VERSION} and dtypes "
                f"{', '.join(get_args(Stored))}. Write the store again with megalight teach."
            )
        return meta

    def read(self, index: int, sample: Sample) -> TopTokens:
        """Return what the teacher predicts for sample ``index``: ``[S]``, with log-probabilities as they are stored.

        Raises:
            DataError: the record is damaged, or was written for other tokens.
        """
        record = self._records[index]
        if record["checksum"] != _checksum(record):
            raise DataError(
                f"sample {index} in {self.folder / RECORDS} is damaged: its checksum differs. Copy the store again, or "
                "write it again with megalight teach."
            )
        if record["tokens"] != _hash(sample):
            raise DataError(
                f"sample {index} in {self.folder} was written for other tokens or documents than those of the data "
                "now. Use the same data, with the same document_mask and fim, or write the store again with "
                "megalight teach."
            )
        ids, log_probs, log_rest = (torch.from_numpy(record[name].copy()) for name in ("ids", "log_probs", "log_rest"))
        return TopTokens(ids, log_probs, log_rest)

    def check(self, samples: Samples[Sample], count: int) -> None:
        """Refuse to serve another run than the store was written for.

        Args:
            samples: of the run.
            count: how many of them it reads.

        Raises:
            DataError: the order differs, samples are missing, or the first or last one has other tokens.
        """
        if samples.order != self.meta.order:
            raise DataError(
                f"{self.folder} was written for another order of samples: other data, seed, sequence_length, number of "
                "steps or batch size. Take the settings it was written with, or write it again with megalight teach "
                "for these."
            )
        if count > self.meta.samples:
            raise DataError(
                f"{self.folder} holds {self.meta.samples} samples, and the run reads {count}; write it again with "
                "megalight teach for this run, or train on fewer."
            )
        for index in (0, count - 1):
            self.read(index, samples[index])


class Taught:
    """Samples with what a teacher predicts for them.

    Args:
        samples: the data set.
        store: holds all that are read.
        collate: makes a batch of samples.
    """

    def __init__(
        self, samples: Samples[Sample], store: TaughtStore, collate: Callable[[Sequence[Sample]], TokenBatch]
    ) -> None:
        self.samples, self.store, self._collate = samples, store, collate

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Sample, TopTokens]:
        sample = self.samples[index]
        return sample, self.store.read(index, sample)

    def collate(self, rows: Sequence[tuple[Sample, TopTokens]]) -> TokenBatch:
        """Make a batch with :attr:`~megalight.types.TokenBatch.taught`."""
        batch = self._collate([sample for sample, _ in rows])

        def stacked(name: str) -> Tensor:
            return torch.stack([getattr(taught, name) for _, taught in rows])

        return TokenBatch(
            batch.tokens,
            batch.labels,
            batch.loss_mask,
            batch.document_lengths,
            taught=TopTokens(stacked("ids"), stacked("log_probs"), stacked("log_rest")),
        )


def _hash(sample: Sample) -> int:
    """Hash what the teacher's prediction depends on."""
    documents = np.asarray(sample.document_lengths or (), np.int64)
    digest = hashlib.blake2b(np.ascontiguousarray(sample.tokens).tobytes(), digest_size=8)
    digest.update(documents.tobytes())
    return int.from_bytes(digest.digest(), "little")


def _checksum(record: Any) -> int:
    # All but the checksum itself, which is the last field.
    return zlib.crc32(record.tobytes()[: -record.dtype["checksum"].itemsize])
