"""Guesses of the next tokens for the engine, which checks them all in one forward pass (speculative decoding).

A pass runs the newest token of a sequence and the guesses after it, and samples at each of these places as it would
without them. Samples follow from seed and position. So a guess that is right saves a pass, and none changes a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from megalight.errors import ConfigurationError, integer
from megalight.inference.blocks import BlockPool
from megalight.inference.cache import Cache
from megalight.inference.parallel import ParallelGPT, evaluating
from megalight.inference.scheduler import Request
from megalight.models.gpt import GPT, GPTConfig
from megalight.types import to_device


class Speculator(Protocol):
    """Guesses tokens; on all ranks of a replica the same."""

    def guess(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Return at most ``counts[i]`` tokens that may follow those of ``requests[i]``, which have a slot."""
        ...

    def drop(self) -> None:
        """Give memory back that depends on sequences."""
        ...


class NGramSpeculator:
    """Guesses what followed the last tokens of a sequence when they came before in it (prompt lookup). It has no model.

    Args:
        guesses: maximum number of guesses.
        longest: how many of the last tokens must come before; fewer serve, down to ``shortest``, if so many do not.
        shortest: at least 1.

    Raises:
        ConfigurationError: a number is no integer of at least 1, or ``shortest`` is above ``longest``.
    """

    def __init__(self, guesses: int = 4, *, longest: int = 3, shortest: int = 2) -> None:
        self.guesses = integer("guesses", guesses)
        self.shortest = integer("shortest", shortest)
        self.longest = integer("longest", longest, self.shortest)
        # Of each request: where its last n tokens ended before, by these tokens, and how many tokens are in it.
        self._places: dict[Request, tuple[dict[tuple[int, ...], int], int]] = {}

    def guess(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """See :class:`Speculator`."""
        self._places = {request: self._places.get(request, ({}, 0)) for request in requests}
        return [self._of(request, min(count, self.guesses)) for request, count in zip(requests, counts, strict=True)]

    def drop(self) -> None:
        """Forget where tokens come."""
        self._places.clear()

    def _of(self, request: Request, count: int) -> list[int]:
        tokens, (places, known) = request.tokens, self._places[request]
        # Ends before the last token: what follows it is not known yet.
        for end in range(max(1, known), len(tokens)):
            for size in range(self.shortest, min(self.longest, end) + 1):
                places[tuple(tokens[end - size : end])] = end
        self._places[request] = places, len(tokens)
        for size in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            if (after := places.get(tuple(tokens[-size:]))) is not None:
                return tokens[after : after + count]
        return []


class DraftSpeculator:
    """Lets a small model guess, greedily.

    Args:
        model: a whole model on the device of the base. On a divided base each rank has it.
        base: the model that it serves.
        guesses: maximum number of guesses.
        max_sequences: that of the engine.

    Raises:
        ConfigurationError: a number is no integer of at least 1, the model has another vocabulary or reads images, or
            its layers cannot forget wrong guesses.
    """

    def __init__(self, model: GPT, base: GPT | ParallelGPT, guesses: int = 4, *, max_sequences: int = 64) -> None:
        config: object = model.config
        if not isinstance(config, GPTConfig) or config.vocab_size != base.config.vocab_size:
            raise ConfigurationError(
                f"the small model has {model.config.vocab_size} tokens and the base {base.config.vocab_size}; take a "
                "model of text with the base's tokenizer."
            )
        self.guesses, self._model = integer("guesses", guesses), model
        self._capacity, slots = config.max_sequence_length, integer("max_sequences", max_sequences)
        blocks = BlockPool(slots, slots * -(-self._capacity // 16), 16)
        self._cache = Cache(model.layers, slots, self._capacity, blocks)
        if not self._cache.reversible:
            raise ConfigurationError(
                "some layers of the small model keep one state for all earlier tokens (Mamba, convolutions), which "
                "cannot forget a wrong guess; take a model of attention."
            )
        self._owners: dict[int, Request] = {}

    def guess(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """See :class:`Speculator`."""
        cache = self._cache
        wanted: dict[int, int] = {}
        fresh: list[list[int]] = []
        places: list[int] = []
        for place, (request, count) in enumerate(zip(requests, counts, strict=True)):
            slot = request.slot
            # It needs room for what it reads: all tokens, and all guesses but the last.
            count = min(count, self.guesses, self._capacity - len(request.tokens) + 1)
            if slot is None or count < 1:
                continue
            if self._owners.get(slot) is not request or cache.lengths[slot] >= len(request.tokens):
                cache.release(slot)
                self._owners[slot] = request
            wanted[slot] = count
            fresh.append(request.tokens[cache.lengths[slot] :])
            places.append(place)
        found: list[list[int]] = [[] for _ in requests]
        if not wanted:
            return found
        slots, device = [*wanted], next(self._model.parameters()).device
        known = [cache.lengths[slot] + len(ids) for slot, ids in zip(slots, fresh, strict=True)]
        ids = to_device([token for each in fresh for token in each], torch.int64, device)
        sizes, steps = [len(each) for each in fresh], []
        for _ in range(max(wanted.values())):
            with torch.no_grad(), evaluating(self._model):
                sequences = cache.extend(slots, sizes, device)
                last = sequences.cu_seqlens[1:].long() - 1
                ids = self._model(ids, sequences, states=cache.states, rows=last).logits.argmax(-1)
            steps.append(ids)
            sizes = [1] * len(slots)
            if len(steps) + max(known) > self._capacity:
                break
        rows = torch.stack(steps, 1).tolist()
        for place, slot, length, row in zip(places, slots, known, rows, strict=True):
            found[place] = row[: wanted[slot]]
            cache.truncate(slot, length)
        return found

    def drop(self) -> None:
        """Give the memory of the cache back."""
        self._cache.drop()
        self._owners.clear()
