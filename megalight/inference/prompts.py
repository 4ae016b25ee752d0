"""What generation takes, as plain values: prompts, the tokens that end a completion, and seeds."""

from __future__ import annotations

import operator
import reprlib
import secrets
from collections.abc import Collection, Sequence, Set
from typing import Any

from torch import Tensor

from megalight.errors import DataError, integer, is_bool
from megalight.inference.parallel import GenerativeModel, ParallelGPT
from megalight.inference.sampling import LARGEST_SEED
from megalight.models.hf_causal_lm import HFConfig


def check_prompts(
    model: GenerativeModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    axis_positions: Sequence[Tensor] | None = None,
) -> tuple[list[list[int]], int]:
    """Return prompts and ``max_new_tokens`` as plain integers. Refuse what :func:`generate` cannot complete."""
    config = model.config
    max_new_tokens = integer("max_new_tokens", max_new_tokens)
    all_ids = [_token_ids(prompt) for prompt in prompts]
    if not all_ids or not all(all_ids):
        raise DataError("a prompt is empty, or there is none; give at least one prompt, each with at least one token.")
    longest = max(map(len, all_ids))
    if longest + max_new_tokens > config.max_sequence_length:
        raise DataError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed max_sequence_length = "
            f"{config.max_sequence_length}; shorten the prompt or lower max_new_tokens (--max-new-tokens)."
        )
    strange = [token for ids in all_ids for token in ids if not 0 <= token < config.vocab_size]
    if strange:
        raise DataError(
            f"token {strange[0]} is outside the model's vocabulary of {config.vocab_size}; "
            "use the tokenizer that the model was trained with."
        )
    axes = None if isinstance(config, HFConfig) else config.position.axes
    if axis_positions is not None:
        if axes is None:
            raise DataError("axis_positions are given, but position.axes of the model is null; leave them out.")
        expected = [(len(axes.sections), len(ids)) for ids in all_ids]
        if (found := [tuple(each.shape) for each in axis_positions]) != expected:
            raise DataError(
                f"axis_positions have shapes {found[:8]}; prompts and axes of the model need {expected[:8]}."
            )
    return all_ids, max_new_tokens


def _token_ids(prompt: Sequence[int]) -> list[int]:
    try:
        found = None if isinstance(prompt, bytes | Set) else [*map(operator.index, prompt)]
    except TypeError:
        found = None
    if found is None or any(map(is_bool, prompt)):
        raise DataError(
            f"a prompt is {reprlib.repr(prompt)}; it must be a list of token ids, which are integers. Encode text with "
            "the tokenizer, or use TextGenerator."
        )
    return found


def end_ids(model: GenerativeModel, eos_id: int | Collection[int] | None) -> frozenset[int]:
    """Return the tokens that end a completion.

    Raises:
        ConfigurationError: one is no token id of the model.
    """
    if eos_id is None:
        return frozenset()
    # Scalars of numpy and torch have the methods of a collection.
    several = isinstance(eos_id, Collection) and getattr(eos_id, "ndim", 1) != 0 and not isinstance(eos_id, str | bytes)
    each: Any = eos_id if several else [eos_id]
    return frozenset(integer("eos_id", token, 0, model.config.vocab_size - 1) for token in each)


def new_seed(model: GenerativeModel) -> int:
    """Return a new seed, the same on all ranks of a replica, which must sample the same tokens."""
    seed = secrets.randbelow(LARGEST_SEED + 1)
    return model.agree(seed) if isinstance(model, ParallelGPT) else seed
