"""Hyperparameters in checkpoints: the plain data that ``save_hyperparameters`` collected."""

from __future__ import annotations

import logging
from typing import Any

from megalight.checkpoint.json_values import encode
from megalight.errors import CheckpointError
from megalight.first_rank import only_first

log = logging.getLogger(__name__)
log.addFilter(only_first)

ENTRIES = ("hyper_parameters", "datamodule_hyper_parameters")
"""Lightning's entries with hyperparameters."""


def keep_plain(checkpoint: dict[str, Any], told: set[str]) -> dict[str, Any]:
    """Return the checkpoint dictionary without hyperparameters that cannot be stored.

    Objects (a loss function, a tokenizer, a config class) cannot be stored: a file must not run code when it is loaded.

    Args:
        told: names with a warning already. New names are added.
    """
    kept = dict(checkpoint)
    for entry in ENTRIES:
        if entry in kept:
            values = {name: value for name, value in kept[entry].items() if _is_plain(value)}
            _tell(sorted(kept[entry].keys() - values.keys() - told), told)
            kept[entry] = values
    return kept


def _is_plain(value: Any) -> bool:
    try:
        encode(value, [])
    except CheckpointError:
        return False
    return True


def _tell(names: list[str], told: set[str]) -> None:
    if names:
        told.update(names)
        log.warning(
            "checkpoints leave out the hyperparameters %s: they are not plain values (numbers, strings, lists, dicts). "
            "Exclude them with save_hyperparameters(ignore=%s) to silence this.",
            ", ".join(names),
            names,
        )
