"""Acceptance length: how many tokens a round of speculative decoding yields with a draft model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from megalight.errors import ConfigurationError
from megalight.inference.generate import check_prompts, end_ids
from megalight.inference.sampling import Sampling
from megalight.inference.speculative import rounds
from megalight.models.eagle import DraftModel
from megalight.models.gpt import GPT


@dataclass(frozen=True)
class Acceptance:
    """Tokens and rounds, of one text or of several.

    Attributes:
        tokens: new tokens of all rounds.
        rounds: rounds in which the draft made all of its guesses. One that the end of a text cuts short is not counted:
            it would have yielded more tokens.
    """

    tokens: int = 0
    rounds: int = 0

    @property
    def length(self) -> float:
        """Mean number of tokens per round: 1 without any right guess."""
        return self.tokens / self.rounds

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(self.tokens + other.tokens, self.rounds + other.rounds)


def measure(
    base: GPT,
    draft: DraftModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    guesses: int = 4,
    eos_id: Collection[int] = (),
) -> tuple[list[list[int]], list[Acceptance]]:
    """Complete prompts greedily, and count what the rounds yield.

    Args:
        base: the whole model.
        draft: a draft that was trained for it, on the same device and in the same dtype.
        prompts: token ids.
        max_new_tokens: length of each completion, at most.
        guesses: how many tokens the draft guesses in a round.
        eos_id: tokens that end a completion.

    Returns:
        the completions, and what was counted for each.
    """
    prompts, max_new_tokens = check_prompts(base, prompts, max_new_tokens)
    texts: list[list[int]] = [[] for _ in prompts]
    counts = [Acceptance() for _ in prompts]
    generator = torch.Generator(next(base.parameters()).device)
    for found in rounds(
        base,
        draft,
        prompts,
        max_new_tokens=max_new_tokens,
        guesses=guesses,
        sampling=Sampling(temperature=0.0),
        ends=end_ids(base, eos_id),
        generator=generator,
    ):
        for place, each in found.items():
            texts[place] += each.tokens
            if each.guessed == guesses and each.complete:
                counts[place] += Acceptance(len(each.tokens), 1)
    return texts, counts


def acceptance_length(
    base: GPT,
    draft: DraftModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    guesses: int = 4,
    eos_id: Collection[int] = (),
) -> float:
    """Return the mean number of tokens per round over greedy completions of the prompts: 1 to ``guesses + 1``.

    The arguments are those of :func:`measure`.

    Raises:
        ConfigurationError: there is no whole round: no prompt, or completions too short for one.
    """
    total = Acceptance()
    if prompts:
        _, counts = measure(base, draft, prompts, max_new_tokens=max_new_tokens, guesses=guesses, eos_id=eos_id)
        total = sum(counts, total)
    check_rounds(total, len(prompts), max_new_tokens, guesses)
    return total.length


def check_rounds(total: Acceptance, prompts: int, max_new_tokens: int, guesses: int) -> None:
    """Refuse counts without a round.

    Raises:
        ConfigurationError: there is none.
    """
    if not total.rounds:
        raise ConfigurationError(
            f"{prompts} prompts with max_new_tokens={max_new_tokens} hold no whole round: the first token is of the "
            f"prompt's own pass, and a round yields up to {guesses + 1} more. Give prompts, and at least "
            f"max_new_tokens={guesses + 2}."
        )
