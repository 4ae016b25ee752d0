"""Rules for the sizes of a data module. This file imports no torch, so that commands can check them early."""

from __future__ import annotations

from megalight.errors import DataError, LayoutError


def check_sizes(
    *,
    global_batch_size: int = 1,
    sequence_length: int = 1,
    num_workers: int = 0,
    seed: int = 0,
    train_samples: int | None = None,
    val_samples: int | None = None,
    test_samples: int | None = None,
) -> None:
    """Refuse sizes that no data can have.

    Raises:
        DataError: with the value and the rule.
    """
    for name, value in (("global_batch_size", global_batch_size), ("sequence_length", sequence_length)):
        if value < 1:
            raise DataError(f"{name} is {value}; it must be at least 1.")
    if num_workers < 0:
        raise DataError(f"num_workers is {num_workers}; it must be at least 0, which reads in the main process.")
    if not 0 <= seed < 2**32:
        raise DataError(f"seed is {seed}; it must be from 0 to {2**32 - 1}.")
    if train_samples is not None and train_samples < 1:
        raise DataError(f"train_samples is {train_samples}; it must be at least 1, or left out.")
    for name, samples in (("val_samples", val_samples), ("test_samples", test_samples)):
        if samples is not None and samples < 0:
            raise DataError(f"{name} is {samples}; it must be at least 0, which reads none, or left out.")


def check_fits(sequence_length: int, longest: int) -> None:
    """Refuse sequences that are too long for the model. Later positions have no embedding, or none that was trained.

    Raises:
        DataError: with both numbers and the remedy.
    """
    if sequence_length > longest:
        raise DataError(
            f"data.sequence_length={sequence_length} is longer than the model's max_sequence_length={longest}; lower "
            "it, or raise max_sequence_length."
        )


def check_replicas(global_batch_size: int, replicas: int) -> None:
    """Refuse batches that replicas of the model cannot share.

    Raises:
        LayoutError: with both numbers and the remedy.
    """
    if global_batch_size < 1 or global_batch_size % replicas:
        raise LayoutError(
            f"global_batch_size is {global_batch_size} and there are {replicas} data-parallel ranks; it must "
            "be a multiple of their number. Change global_batch_size or the layout."
        )


def check_vocabulary(tokens: int, vocab_size: int) -> None:
    """Refuse tokens for which the model has no embedding. The reverse is fine: vocabularies are padded.

    Raises:
        DataError: with both numbers and the remedy.
    """
    if tokens > vocab_size:
        raise DataError(
            f"the data's tokenizer has {tokens} tokens, but the model's vocab_size is {vocab_size}; raise vocab_size, "
            "or prepare the data with a smaller tokenizer."
        )
