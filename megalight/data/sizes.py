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
