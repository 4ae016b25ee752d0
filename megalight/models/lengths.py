"""Check of the length of sequences."""

from __future__ import annotations

from megalight.errors import DataError
from megalight.types import PackedSequences


def check_length(sequences: PackedSequences, limit: int) -> None:
    """Refuse sequences longer than ``limit``, the model's ``max_sequence_length``.

    Raises:
        DataError: a sequence is too long.
    """
    # The longest one is known on the host, so this check does not wait for the device.
    if sequences.longest > limit:
        raise DataError(
            f"a sequence has {sequences.longest} tokens, but the model takes at most max_sequence_length = {limit}; "
            "shorten the sequences or configure a longer model."
        )
