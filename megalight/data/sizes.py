"""Rules for the sizes of a data module. This file imports no torch, so that commands can check them early."""

from __future__ import annotations

from megalight.errors import DataError


def check_sizes(*, global_batch_size: int = 1, sequence_length: int = 1, num_workers: int = 0) -> None:
    """Refuse sizes that no data can have.

    Raises:
        DataError: with the value and the rule.
    """
    for name, value in (("global_batch_size", global_batch_size), ("sequence_length", sequence_length)):
        if value < 1:
            raise DataError(f"{name} is {value}; it must be at least 1.")
    if num_workers < 0:
        raise DataError(f"num_workers is {num_workers}; it must be at least 0, which reads in the main process.")


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
