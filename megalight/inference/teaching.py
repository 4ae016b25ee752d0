"""A teacher's predictions for the samples of a run, written to disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megalight.data.taught import Stored, TaughtMeta
from megalight.errors import ConfigurationError, DataError
from megalight.inference.recording import RunData, common_facts, splits_of, write_records
from megalight.models.gpt import GPT
from megalight.ops.common import wide
from megalight.types import TokenBatch

NAMES = "ids", "log_probs", "log_rest"
"""Values of a record."""

BLOCK = 1 << 26
"""Elements of logits that are widened at a time."""


def check_teaching(vocab_size: int, longest: int, data: RunData, top_k: int, temperature: float) -> None:
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
    data: RunData,
    output: Path,
    *,
    top_k: int,
    temperature: float = 1.0,
    dtype: Stored = "float16",
    micro_batch_size: int = 1,
    validation: bool = False,
    part: int = 0,
    parts: int = 1,
    progress: bool = False,
) -> TaughtMeta | None:
    """Write what a teacher predicts for the samples of a run. What is on disk already is not computed again.

    Args:
        model: the whole teacher, in evaluation mode.
        data: the data of the run. Its ``trainer`` says how many samples there are.
        output: the folder to write; see :mod:`megalight.data.taught`.
        top_k: ids to store for each token.
        temperature: divides the logits.
        dtype: of the log-probabilities on disk.
        micro_batch_size: samples of a forward pass.
        validation: for the validation samples, too.
        part, parts: which of how many equal parts of the samples. Processes may write parts at the same time.
        progress: show a progress bar.

    Returns:
        the facts about the store; None if parts are missing.

    Raises:
        ConfigurationError, DataError: see :func:`check_teaching`; the batches are not of text alone, or the folder
            holds something else.
    """
    config = model.config
    check_teaching(config.vocab_size, config.max_sequence_length, data, top_k, temperature)
    splits = splits_of(data, validation)
    meta = TaughtMeta(
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
        device=next(model.parameters()).device,
        micro_batch_size=micro_batch_size,
        part=part,
        parts=parts,
        progress=progress,
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
