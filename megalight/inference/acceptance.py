"""Acceptance length: how many tokens a round of speculative decoding yields with a draft model.

In a round the draft guesses the next tokens one after another, and the base checks them all in one forward pass. It
keeps guesses up to the first that differs from its own choice, and adds that choice. With greedy choices the text is
the base's own, so it is enough to generate it once: the draft then guesses from all of its places together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.inference.generate import evaluating, generate
from megalight.models.eagle import DraftModel
from megalight.models.gpt import GPT
from megalight.models.hidden import KEPT, keeping
from megalight.nn import Lineage
from megalight.types import PackedSequences


@torch.no_grad()
def acceptance_length(
    base: GPT, draft: DraftModel, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, guesses: int = 4
) -> float:
    """Return the mean number of tokens per round over greedy completions of the prompts: 1 to ``guesses + 1``.

    A last round that the end of a completion cuts short is not counted: it would have yielded more tokens.

    Args:
        base: the whole model.
        draft: a draft that was trained for it, on the same device and in the same dtype.
        prompts: token ids.
        max_new_tokens: length of each completion.
        guesses: how many tokens the draft guesses in a round.

    Raises:
        ConfigurationError: there is no whole round: no prompt, or completions too short for one.
    """
    tokens = rounds = 0
    for prompt in prompts:
        (completion,) = generate(base, [prompt], max_new_tokens=max_new_tokens, temperature=0.0)
        text = torch.tensor([*prompt, *completion], device=base.embed.word.weight.device)  # type: ignore[union-attr]
        with evaluating(base), evaluating(draft):
            right = _in_a_row(drafted(base, draft, text, guesses), text)
        # The first token comes from the prompt's own pass. A round begins behind each last token of the base.
        place, end = len(prompt) - 1, len(text) - 2
        while place + right[place] < end:
            tokens, rounds = tokens + right[place] + 1, rounds + 1
            place += right[place] + 1
    if not rounds:
        raise ConfigurationError(
            f"{len(prompts)} prompts with max_new_tokens={max_new_tokens} hold no whole round: the first token is of "
            f"the prompt's own pass, and a round yields up to {guesses + 1} more. Give prompts, and at least "
            f"max_new_tokens={guesses + 2}."
        )
    return tokens / rounds


@torch.no_grad()
def drafted(base: GPT, draft: DraftModel, text: Tensor, guesses: int) -> list[Tensor]:
    """Return the guesses ``[T]`` of each step of a round, for a round at each place of the text ``[T]``.

    In the round at place ``t`` the base has just chosen the token at ``t + 1``, so guess ``n`` is for ``t + 2 + n``.
    """
    sequences = PackedSequences.of_uniform(1, len(text), text.device)
    auxiliary = auxiliary_states(base, draft.config.auxiliary_layers, text, sequences)
    table, ids = base.embed.word, torch.tensor(draft.config.draft_ids, device=text.device)  # type: ignore[union-attr]
    hidden, lineage, given = draft.fuse(auxiliary), Lineage(), text.roll(-1)
    found = []
    for _ in range(guesses):
        hidden = draft.step(hidden, table(given), sequences, lineage)
        given = draft.head.top(hidden)
        given = ids[given] if len(ids) else given
        found.append(given)
    return found


def _in_a_row(found: Sequence[Tensor], text: Tensor) -> list[int]:
    """Return how many guesses of each place are the text's own tokens before the first that is not."""
    going, count = torch.ones_like(text), torch.zeros_like(text)
    for ahead, given in enumerate(found, 2):
        going = going * (given == text.roll(-ahead))
        count += going
    counts: list[int] = count.tolist()
    return counts


def auxiliary_states(base: GPT, layers: Sequence[int], text: Tensor, sequences: PackedSequences) -> Tensor:
    """Return the base's hidden states ``[T, n h]`` after so many of its layers, side by side."""
    names = [f"layers.{after - 1}" for after in layers]
    with keeping(base, names) as found:
        # One row of logits is enough: only the layers' outputs are wanted.
        base(text, sequences, rows=torch.zeros(1, dtype=torch.long, device=text.device))
    return torch.cat([found[KEPT + name] for name in names], -1)
