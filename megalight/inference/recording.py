"""Running a frozen model over the samples of a run, and storing what it makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from megalight.data.blend import Samples
from megalight.data.progress import progress_bar
from megalight.data.records import RecordsMeta, RecordsWriter, batches_of
from megalight.data.tokenizer import FILE as TOKENIZER
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError
from megalight.types import TokenBatch

COMMIT = 64
"""Micro-batches between notes of what is on disk; a process that is killed computes at most so many again."""


class RunData(Protocol):
    """What a data module says of its samples; see :class:`~megalight.data.module.TokenDataModule`."""

    sequence_length: int

    @property
    def collate(self) -> Callable[..., Any]:
        """Make a batch of samples."""

    def training_samples(self) -> tuple[Samples[Any], int]:
        """Return the samples, and how many of them a run reads."""

    def validation_samples(self) -> tuple[Samples[Any], int] | None:
        """Return the same of the validation split; None if a run reads none of it."""

    def checkpoint_files(self) -> dict[str, bytes]:
        """Return the files of the tokenizer, if there is one."""


def splits_of(data: RunData, validation: bool) -> dict[str, tuple[Samples[Any], int]]:
    """Return samples and their number by split.

    Args:
        data: the data of the run.
        validation: with the validation samples, if there are any.
    """
    found = {"train": data.training_samples()}
    if validation and (more := data.validation_samples()) is not None:
        found["validation"] = more
    return found


def common_facts(data: RunData, splits: Mapping[str, tuple[Samples[Any], int]]) -> dict[str, Any]:
    """Return the facts that all kinds of records state; see :class:`~megalight.data.records.RecordsMeta`."""
    files = data.checkpoint_files()
    samples, count = splits["train"]
    found = {
        "samples": count,
        "order": samples.order,
        "sequence_length": data.sequence_length,
        "tokenizer": Tokenizer.from_json(files[TOKENIZER].decode()).identity if TOKENIZER in files else None,
    }
    if "validation" in splits:
        samples, count = splits["validation"]
        found |= {"validation_samples": count, "validation_order": samples.order}
    return found


def write_records(
    output: Path,
    meta: RecordsMeta,
    data: RunData,
    splits: Mapping[str, tuple[Samples[Any], int]],
    compute: Callable[[TokenBatch], Mapping[str, Tensor]],
    values: Callable[[Mapping[str, Tensor]], Mapping[str, NDArray[Any]]],
    *,
    device: torch.device,
    micro_batch_size: int = 1,
    part: int = 0,
    parts: int = 1,
    progress: bool = False,
    before: Callable[[], None] = lambda: None,
) -> bool:
    """Write the records of one part of the samples that are not on disk. Return whether all parts are there.

    Args:
        output: the folder; see :mod:`megalight.data.records`.
        meta: the facts.
        data: the data of the run.
        splits: its samples.
        compute: runs the model over a micro-batch ``[b, S]``; returns tensors ``[b, S, ...]``.
        values: makes the values of a record of those of one sample.
        device: of the model.
        micro_batch_size: samples of a forward pass.
        part, parts: which of how many equal parts of each split. Parts may be written at the same time.
        progress: show a progress bar.
        before: writes what else belongs into the folder, once that is begun.

    Raises:
        ConfigurationError: a number is out of range, or the batches are not of text alone.
        DataError: the folder holds something else.
    """
    if not 0 <= part < parts:
        raise ConfigurationError(f"part {part} of {parts} is not there; parts are counted from 0 to {parts - 1}.")
    if parts > meta.samples:
        # An empty first part may come when the folder is complete, and what `before` writes would be missing.
        raise ConfigurationError(f"there are {meta.samples} samples for {parts} parts; divide them into fewer.")
    with progress_bar(progress) as bar, RecordsWriter(output, meta) as writer:
        before()
        missing = {split: writer.missing(split, part, parts) for split in splits}
        task = bar.add_task("samples", total=sum(map(len, missing.values())))
        for split, (samples, _) in splits.items():
            for number, indices in enumerate(batches_of(missing[split], micro_batch_size), 1):
                rows = [samples[index] for index in indices]
                batch = data.collate(rows)
                if not isinstance(batch, TokenBatch):
                    raise ConfigurationError(
                        f"{type(data).__name__} makes batches of {type(batch).__name__}, and records are of text; use "
                        "GPTDataModule or SFTDataModule."
                    )
                found = compute(batch.to(device))
                for place, (index, sample) in enumerate(zip(indices, rows, strict=True)):
                    writer.add(split, index, sample, values({name: tensor[place] for name, tensor in found.items()}))
                if number % COMMIT == 0:
                    writer.commit()
                bar.advance(task, len(rows))
            writer.commit()
        return writer.finish()
