"""Frozen dataclasses as batches under Lightning's own precision plugins."""

from __future__ import annotations

from functools import partial
from typing import Any


def keep_batches(plugin: Any) -> None:
    """Let a precision plugin leave batches that are frozen dataclasses, such as ``TokenBatch``, as they are.

    Lightning's plugins of 16 and 64 bits refuse them, as they set each field. Masks and counts must keep their dtype,
    since sums of ones end at 256 in bfloat16; the model's layers make their activations in its own dtype.
    """
    # On the instance, once: a plugin serves every stage of its Trainer. No lambda, as spawned ranks get it by pickle.
    if not isinstance(plugin.convert_input, partial):
        plugin.convert_input = partial(_converted, plugin.convert_input)


def _converted(convert: Any, batch: Any) -> Any:
    options = getattr(batch, "__dataclass_params__", None)
    return batch if options is not None and options.frozen else convert(batch)
