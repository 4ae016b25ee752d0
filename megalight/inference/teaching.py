"""A teacher's predictions for the training samples of a run, written to disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megalight.data.blend import Samples
from megalight.data.prepare import progress_bar
from megalight.data.taught import Stored, TaughtMeta, TaughtWriter
from megalight.data.tokenizer import FILE as TOKENIZER
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError
from megalight.models.gpt import GPT
from megalight.ops.common import wide
from megalight.types import TokenBatch, TopTokens

BLOCK = 1 << 26
"""Elements of logits that are widened at a time."""


class TrainingData(Protocol):
    """What a data module says of its training samples; see :class:`~megalight.data.module.TokenDataModule`."""

    sequence_length: int

    @property
    def collate(self) -> Callable[..., Any]:
        """Make a batch of samples."""

    def training_samples(self) -> tuple[Samples[Any], int]:
        """Return the samples, and how many of them a run reads."""

    def checkpoint_files(self) -> dict[str, bytes]:
        """Return the files of the tokenizer, if there is one."""


def check_teaching(vocab_size: int, longest: int, data: TrainingData, top_k: int, temperature: float) -> None:
    """Check what :func:`teach` is given, before the teacher is loaded.

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
def teach(
    model: GPT,
    data: TrainingData,
    output: Path,
    *,
    top_k: int,
    temperature: float = 1.0,
    dtype: Stored = "float16",
    micro_batch_size: int = 1,
    progress: bool = False,
) -> TaughtMeta:
    """Write what a teacher predicts for all training samples of a run. Validation samples are left out.

    Args:
        model: the whole teacher, in evaluation mode.
        data: the data of the run. Its ``trainer`` says how many samples there are.
        output: the folder to write; see :mod:`megalight.data.taught`.
        top_k: ids to store for each token.
        temperature: divides the logits.
        dtype: of the log-probabilities on disk.
        micro_batch_size: samples of a forward pass.
        progress: show a progress bar.

    Returns:
        the facts about the store.

    Raises:
        ConfigurationError, DataError: see :func:`check_teaching`; the batches are not of text alone.
    """
    config = model.config
    check_teaching(config.vocab_size, config.max_sequence_length, data, top_k, temperature)
    samples, count = data.training_samples()
    files, device = data.checkpoint_files(), next(model.parameters()).device
    meta = TaughtMeta(
        samples=count,
        order=samples.order,
        sequence_length=data.sequence_length,
        top_k=top_k,
        vocab_size=config.vocab_size,
        temperature=temperature,
        dtype=dtype,
        tokenizer=Tokenizer.from_json(files[TOKENIZER].decode()).identity if TOKENIZER in files else None,
    )
    with progress_bar(progress) as bar, TaughtWriter(output, meta) as writer:
        task = bar.add_task("samples", total=count)
        for start in range(0, count, micro_batch_size):
            rows = [samples[index] for index in range(start, min(start + micro_batch_size, count))]
            batch = data.collate(rows)
            if not isinstance(batch, TokenBatch):
                raise ConfigurationError(
                    f"{type(data).__name__} makes batches of {type(batch).__name__}, and a teacher's predictions are "
                    "stored for text; use GPTDataModule or SFTDataModule."
                )
            batch = batch.to(device)
            logits = model(batch.tokens.flatten(), batch.sequences).logits
            pieces = list(_top(logits, top_k, temperature))
            taught = [_rows(torch.cat(parts), batch.tokens).cpu() for parts in zip(*pieces, strict=True)]
            for sample, *row in zip(rows, *taught, strict=True):
                writer.add(sample, TopTokens(*row))
            bar.advance(task, len(rows))
    return meta


def _top(logits: Tensor, top_k: int, temperature: float) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield ids and log-probabilities ``[n, K]`` and the logarithm of the rest ``[n]``, for blocks of rows."""
    for block in torch.split(logits, max(1, BLOCK // logits.shape[1])):
        logs = (block.to(wide(block.dtype)) / temperature).log_softmax(-1)
        largest, ids = logs.topk(top_k, -1)
        # Of the others, and not 1 minus these: that would cancel.
        yield ids.int(), largest, logs.scatter_(-1, ids, -torch.inf).logsumexp(-1)


def _rows(packed: Tensor, tokens: Tensor) -> Tensor:
    return packed.view(*tokens.shape, *packed.shape[1:])
