"""Beam search on top of the engine: the completions of a prompt with the largest probability that a search finds."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from megalight.errors import ConfigurationError, as_float, integer, is_bool
from megalight.inference.engine import DynamicEngine
from megalight.inference.prompts import check_prompts, end_ids
from megalight.inference.sampling import SamplingParams

LARGEST_PENALTY = 50
"""The power of a length of a million tokens is a number, still."""


class Beam(NamedTuple):
    """A completion that a search has found.

    Attributes:
        score: the sum of the log-probabilities of its tokens, over a power of their number.
        tokens: with the one that ended it.
    """

    score: float
    tokens: list[int]


def beam_search(
    engine: DynamicEngine,
    prompt: Sequence[int],
    *,
    width: int,
    max_new_tokens: int,
    eos_id: int | Collection[int] | None = None,
    length_penalty: float = 1.0,
) -> list[Beam]:
    """Return the ``width`` best completions that are found, from the best.

    In each round every beam is a request for one token, with the most probable ones. The prefix cache has the full
    blocks of its tokens, so only those after them run. The search ends when no beam can become better than those that
    have ended.

    Args:
        engine: an engine without other requests.
        prompt: token ids.
        width: number of beams.
        max_new_tokens: maximum length of a completion.
        eos_id: a completion ends with this token, or with one of these.
        length_penalty: the sum of log-probabilities is divided by this power of the number of tokens. Above 0, longer
            completions gain. From -50 to 50.

    Raises:
        ConfigurationError: the engine has requests, or a number is out of range.
        DataError: see :meth:`~megalight.inference.engine.DynamicEngine.add`.
    """
    if engine.unfinished:
        raise ConfigurationError("the engine has other requests; search when it has none, or make another engine.")
    width = integer("width", width)
    (prompt,), max_new_tokens = check_prompts(engine.model, [prompt], max_new_tokens)
    penalty = math.nan if is_bool(length_penalty) else as_float(length_penalty)
    if not abs(penalty) <= LARGEST_PENALTY:
        raise ConfigurationError(
            f"length_penalty is {length_penalty!r}; it must be a number from -{LARGEST_PENALTY} to {LARGEST_PENALTY}."
        )
    ends = end_ids(engine.model, eos_id)
    # Each beam may end in as many ways as there are ends, and must have as many others.
    count = min(engine.model.config.vocab_size, width + len(ends))
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[Beam] = []
    for length in range(1, max_new_tokens + 1):
        candidates: list[tuple[float, list[int]]] = []
        numbers = {
            engine.add(
                [*prompt, *tokens],
                max_new_tokens=1,
                sampling_params=SamplingParams(temperature=0),
                log_probs=True,
                top_log_probs=count,
            ): (total, tokens)
            for total, tokens in running
        }
        for number, found in engine.run().items():
            total, tokens = numbers[number]
            for top in found.top_log_probs or ():
                candidates += [(total + value, [*tokens, token]) for token, value in top.items()]
        last = length == max_new_tokens
        for total, tokens in candidates:
            if tokens[-1] in ends or last:
                ended.append(Beam(total / length**penalty, tokens))
        ended = heapq.nlargest(width, ended)
        running = heapq.nlargest(width, [each for each in candidates if each[1][-1] not in ends])
        # A sum only becomes less; divided by more it becomes larger.
        longest = max_new_tokens if penalty > 0 else length
        if not running or (len(ended) == width and running[0][0] / longest**penalty <= ended[-1].score):
            break
    return ended
