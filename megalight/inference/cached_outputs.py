"""Writing cached outputs: a frozen model runs over the samples of a run, and what it returns is stored on disk.

:func:`cache_logits` stores a teacher's logits, :func:`cache_hidden_states` what a draft reads of its base, in the
format of :mod:`megalight.data.cached_outputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from megalight import checkpoint
from megalight.checkpoint.ranks import alone
from megalight.checkpoint.view import views_of_source
from megalight.data.blend import Samples
from megalight.data.cached_outputs import (
    ENDS,
    CachedLogitsMeta,
    HiddenStatesMeta,
    LogitsDtype,
    RecordsMeta,
    RecordsWriter,
    batches_of,
    check_begun,
    hidden_state_values,
)
from megalight.data.prepare import progress_bar
from megalight.data.tokenizer import FILE as TOKENIZER
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError, integer
from megalight.models.distillation import OUTPUT, SAVED
from megalight.models.eagle import EagleConfig
from megalight.models.eagle.base import BASE, BaseModel
from megalight.models.gpt import GPT
from megalight.models.hf_causal_lm import HFModel
from megalight.models.loading import BASE as WHOLE
from megalight.models.loading import widest
from megalight.models.stored import open_model
from megalight.ops.common import wide
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
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


@dataclass(frozen=True)
class CachingOptions:
    """Which samples are cached, and how.

    Attributes:
        micro_batch_size: samples of a forward pass.
        validation: the validation samples, too.
        part, parts: which of how many equal parts of each split. Processes may write parts at the same time.
        progress: show a progress bar.

    Raises:
        ConfigurationError: ``micro_batch_size`` is below 1.
    """

    micro_batch_size: int = 1
    validation: bool = False
    part: int = 0
    parts: int = 1
    progress: bool = False

    def __post_init__(self) -> None:
        integer("micro_batch_size (--micro-batch-size)", self.micro_batch_size)


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
    """Return the facts that all kinds of records state; see :class:`~megalight.data.cached_outputs.RecordsMeta`."""
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
    options: CachingOptions,
    *,
    device: torch.device,
    before: Callable[[], None] = lambda: None,
) -> bool:
    """Write the records of one part of the samples that are not on disk. Return whether all parts are there.

    Args:
        output: the folder; see :mod:`megalight.data.cached_outputs`.
        meta: the facts.
        data: the data of the run.
        splits: its samples.
        compute: runs the model over a micro-batch ``[b, S]``; returns tensors ``[b, S, ...]``.
        values: makes the values of a record of those of one sample.
        options: which samples, and how they are computed.
        device: of the model.
        before: writes what else belongs into the folder, once that is begun.

    Raises:
        ConfigurationError: a number is out of range, or the batches are not of text alone.
        DataError: the folder holds something else.
    """
    part, parts = options.part, options.parts
    if not 0 <= part < parts:
        raise ConfigurationError(f"part {part} of {parts} is not there; parts are counted from 0 to {parts - 1}.")
    if parts > meta.samples:
        # An empty first part may come when the folder is complete, and what `before` writes would be missing.
        raise ConfigurationError(f"there are {meta.samples} samples for {parts} parts; divide them into fewer.")
    with progress_bar(options.progress) as bar, RecordsWriter(output, meta) as writer:
        before()
        missing = {split: writer.missing(split, part, parts) for split in splits}
        task = bar.add_task("samples", total=sum(map(len, missing.values())))
        for split, (samples, _) in splits.items():
            for number, indices in enumerate(batches_of(missing[split], options.micro_batch_size), 1):
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


# Hidden states of the base of a draft


def cache_hidden_states(
    base: BaseModel,
    config: EagleConfig,
    data: RunData,
    output: Path,
    options: CachingOptions,
    *,
    device: torch.device | str = "cpu",
    dtype: str | None = None,
) -> HiddenStatesMeta | None:
    """Write the hidden states that a draft learns from. What is on disk already is not computed again.

    Args:
        base: the base. It is whole in this process, whatever its layout in the run.
        config: the draft, with the sizes of this base.
        data: the data of the run that will train it. Its ``trainer`` says how many samples there are.
        output: the folder to write; see :mod:`megalight.data.cached_outputs`.
        options: which samples, and how they are computed.
        device: device of the base.
        dtype: of the base and of the states on disk; None: as the base is saved.

    Returns:
        the facts about the folder; None if parts are missing.

    Raises:
        DataError: the sequences are too long for the draft, or the folder holds something else.
    """
    if data.sequence_length > config.max_sequence_length:
        raise DataError(
            f"data.sequence_length={data.sequence_length} is longer than max_sequence_length="
            f"{config.max_sequence_length} of the draft; lower it."
        )
    splits, weights = splits_of(data, options.validation), open_model(base.folder).weights
    dtype = dtype or str(widest(weights)).removeprefix("torch.")
    meta = HiddenStatesMeta(
        **common_facts(data, splits), hidden_size=config.hidden_size, layers=config.auxiliary_layers, dtype=dtype
    )
    check_begun(output, meta)
    # As in a run beside the base, which is whole here, whatever its layout there.
    whole = replace(base, layout=Layout())
    declared = replace(whole.frozen(whole.task(config.auxiliary_layers), config.draft_ids), submodule=None)
    run = declared.build(BASE, ParallelMesh(), getattr(torch, dtype), torch.device(device))

    def compute(batch: TokenBatch) -> dict[str, Tensor]:
        with torch.inference_mode():
            (found,) = run([batch])
        return {name: tensor.view(*batch.tokens.shape, -1) for name, tensor in found.items()}

    complete = write_records(
        output,
        meta,
        data,
        splits,
        compute,
        lambda row: hidden_state_values(row, meta.dtype),
        options,
        device=torch.device(device),
        # The first part alone: they are the same for all.
        before=lambda: None if options.part else save_ends(base, output),
    )
    return meta if complete else None


def save_ends(base: BaseModel, output: Path) -> None:
    """Write the base's embedding and output layer, with which its draft computes."""
    if (output / ENDS).exists():
        return
    stored = open_model(base.folder)
    names = [f"{SAVED}embed.word.weight"] + [f"{SAVED}{OUTPUT}.weight"] * (not stored.config.tie_embeddings)
    described = {"family": stored.family.name, "config": stored.config.to_dict(), "transforms": [], WHOLE: True}
    with alone() as group:
        checkpoint.save(
            output / ENDS,
            views_of_source(stored.weights, names, None, group),
            common={"model": described},
            files=dict(stored.files),
            process_group=group,
        )


# Teacher logits


NAMES = "ids", "log_probs", "log_rest"
"""Values of a record."""

BLOCK = 1 << 26
"""Elements of logits that are widened at a time."""


def check_logits_cache(vocab_size: int, longest: int, data: RunData, top_k: int, temperature: float) -> None:
    """Check what :func:`cache_logits` is given, before the teacher is loaded.

    Args:
        vocab_size: of the teacher.
        longest: tokens of the longest sequence that the teacher can read.
        data: the data of the run.
        top_k: ids to store for each token.
        temperature: divides the logits.

    Raises:
        ConfigurationError: ``top_k`` or ``temperature`` is out of range.
        DataError: the sequences are too long for the teacher.
    """
    if not 1 <= top_k <= vocab_size:
        raise ConfigurationError(
            f"top_k={top_k} must be from 1 to {vocab_size}, the teacher's vocab_size; 64 is usual."
        )
    if not 0 < temperature < float("inf"):
        raise ConfigurationError(f"temperature={temperature} must be positive and finite; 1 is usual.")
    if data.sequence_length > longest:
        raise DataError(
            f"data.sequence_length={data.sequence_length} is longer than max_sequence_length={longest} of the "
            "teacher; lower it, or take another teacher."
        )


@torch.inference_mode()
def cache_logits(
    model: GPT | HFModel,
    data: RunData,
    output: Path,
    options: CachingOptions,
    *,
    top_k: int,
    temperature: float = 1.0,
    dtype: LogitsDtype = "float16",
) -> CachedLogitsMeta | None:
    """Write what a teacher predicts for the samples of a run. What is on disk already is not computed again.

    Args:
        model: the whole teacher, in evaluation mode.
        data: the data of the run. Its ``trainer`` says how many samples there are.
        output: the folder to write; see :mod:`megalight.data.cached_outputs`.
        options: which samples, and how they are computed.
        top_k: ids to store for each token.
        temperature: divides the logits.
        dtype: of the log-probabilities on disk.

    Returns:
        the facts about the store; None if parts are missing.

    Raises:
        ConfigurationError, DataError: see :func:`check_logits_cache`; the batches are not of text alone, or the folder
            holds something else.
    """
    config = model.config
    check_logits_cache(config.vocab_size, config.max_sequence_length, data, top_k, temperature)
    splits = splits_of(data, options.validation)
    meta = CachedLogitsMeta(
        **common_facts(data, splits),
        top_k=top_k,
        vocab_size=config.vocab_size,
        temperature=temperature,
        dtype=dtype,
    )

    def compute(batch: TokenBatch) -> dict[str, Tensor]:
        logits = model(batch.tokens.flatten(), batch.sequences).logits
        columns = zip(*_top(logits, top_k, temperature), strict=True)
        return {name: _rows(torch.cat(blocks), batch.tokens) for name, blocks in zip(NAMES, columns, strict=True)}

    complete = write_records(
        output,
        meta,
        data,
        splits,
        compute,
        lambda row: {name: tensor.cpu().numpy() for name, tensor in row.items()},
        options,
        device=next(model.parameters()).device,
    )
    return meta if complete else None


def _top(logits: Tensor, top_k: int, temperature: float) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield ids and log-probabilities ``[n, K]`` and the logarithm of the rest ``[n]``, for blocks of rows."""
    for block in torch.split(logits, max(1, BLOCK // logits.shape[1])):
        logs = (block.to(wide(block.dtype)) / temperature).log_softmax(-1)
        largest, ids = logs.topk(top_k, -1)
        # Of the others, and not 1 minus these: that would cancel.
        yield ids.int(), largest, logs.scatter_(-1, ids, -torch.inf).logsumexp(-1)


def _rows(packed: Tensor, tokens: Tensor) -> Tensor:
    return packed.view(*tokens.shape, *packed.shape[1:])
