"""Speculative decoding: a draft guesses the next tokens, and the base checks them all in one forward pass.

In a round the draft guesses up to ``k`` tokens, one after another. The base then runs the newest token and the guesses
together, and samples a token at each of these places, as it would without a draft. Samples are kept up to the first
that differs from its guess, and that one is kept, too. So the text has the distribution of the base's own text, and
greedy text is the base's own, token for token (https://arxiv.org/abs/2211.17192, with a draft that is certain of its
guesses).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalight import checkpoint
from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.data.tokenizer import FILE as TOKENIZER
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError, integer
from megalight.inference.cache import Cache
from megalight.inference.parallel import ParallelGPT, evaluating
from megalight.inference.sampler import PassSampling, TokenCounts
from megalight.inference.sampling import SamplingParams, check_sampled
from megalight.inference.scheduler import Request
from megalight.models.eagle import DraftModel
from megalight.models.eagle.serving_format import is_draft
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.hidden import KEPT, keeping
from megalight.models.saved import companions_of, description, saved_model
from megalight.types import PackedSequences


class DraftRound(NamedTuple):
    """What a round yields for one prompt.

    Attributes:
        tokens: the new tokens: guesses that were right, and one more.
        guessed: how many tokens the draft guessed.
        complete: whether the round ran to its end. Otherwise the end of the sequence cut it short.
    """

    tokens: list[int]
    guessed: int
    complete: bool


def check_draft(base: GPT | ParallelGPT, draft: DraftModel, guesses: int = 1) -> None:
    """Refuse a draft that was made for another base, bases that drafts cannot serve, and rounds without a guess.

    Raises:
        ConfigurationError: sizes differ, the base lacks a layer that the draft reads, reads images, or has experts that
            several replicas share, or ``guesses`` is no integer of at least 1.
    """
    config: object = base.config
    if not isinstance(config, GPTConfig):
        raise ConfigurationError("the base reads images, and drafts serve models of text; leave the draft out.")
    if isinstance(base, ParallelGPT) and base.shares_experts:
        raise ConfigurationError(
            "experts of the base are on ranks of several replicas, which must run equally often, and rounds of a draft "
            "differ in number. Leave the draft out, or divide the base otherwise."
        )
    integer("guesses", guesses)
    if draft.config.beside(config) != draft.config:
        raise ConfigurationError("the draft has no sizes yet; build it of EagleConfig.beside(base).")


@torch.no_grad()
def rounds(
    base: GPT | ParallelGPT,
    draft: DraftModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    guesses: int,
    sampling_params: SamplingParams,
    ends: Collection[int],
    seeds: Sequence[int],
) -> Iterator[dict[int, DraftRound]]:
    """Yield what each round yields for each prompt that goes on. The first one is the prompts' own pass.

    Args:
        base: a whole model, or this rank's part of one; all ranks of a replica call this together.
        draft: a draft that was trained for it, whole, on the same device and in the same dtype.
        prompts: token ids.
        max_new_tokens: limit of new tokens for each prompt.
        guesses: how many tokens the draft guesses in a round.
        sampling_params: how tokens are chosen.
        ends: tokens that end a sequence.
        seeds: of each prompt's samples. A draft does not change the samples, which follow from seed and position.

    Raises:
        ConfigurationError: ``guesses`` is out of range, the draft does not fit the base, or layers of the base cannot
            forget tokens.
    """
    check_draft(base, draft, guesses)
    if sampling_params.penalized:
        raise ConfigurationError(
            "penalties depend on the tokens so far, which a draft only guesses; leave the draft or the penalties out."
        )
    capacity = max(map(len, prompts)) + max_new_tokens
    pair = _BaseAndDraft(base, draft, len(prompts), capacity)
    left = dict.fromkeys(range(len(prompts)), max_new_tokens)
    requests = [
        Request(slot, list(prompt), len(prompt), max_new_tokens, sampling_params, ends, None, seed)
        for slot, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    # Of each running sequence: the tokens that neither model has read, the newest one and what was guessed after it.
    given = {slot: list(prompt) for slot, prompt in enumerate(prompts)}
    guessed: dict[int, list[int]] = {slot: [] for slot in given}
    while given:
        with evaluating(base), evaluating(draft):
            logits, states = pair.check(given, guessed)
        # One choice after the newest token, and one after each guess: the last follows all that is stored.
        places = [(requests[slot], more) for slot in given for more in range(len(guessed[slot]) + 1)]
        sampling = PassSampling(TokenCounts(0), [each for each, _ in places], ahead=[more for _, more in places])
        chosen = sampling(torch.cat(list(logits.values())))[:, 0].long().tolist()
        found: dict[int, DraftRound] = {}
        for slot in list(given):
            choices, chosen = chosen[: len(guessed[slot]) + 1], chosen[len(guessed[slot]) + 1 :]
            check_sampled({slot: choices})
            found[slot] = _kept(choices, guessed[slot], ends)
            left[slot] -= len(found[slot].tokens)
            requests[slot].tokens += found[slot].tokens
        yield found
        going = [slot for slot, each in found.items() if left[slot] and each.tokens[-1] not in ends]
        # Read by the base: what was new, and the guesses that were right.
        read = {slot: given[slot] + found[slot].tokens[:-1] for slot in going}
        for slot in going:
            pair.base.truncate(slot, pair.base.lengths[slot] - len(guessed[slot]) + len(found[slot].tokens) - 1)
        after = {slot: found[slot].tokens[-1] for slot in going}
        # The base adds a token to the right guesses, so one guess less can be of use.
        counts = {slot: min(guesses, left[slot] - 1) for slot in going}
        with evaluating(draft):
            guessed = pair.guess(read, after, {slot: states[slot][: len(read[slot])] for slot in going}, counts)
        given = {slot: [after[slot]] for slot in going}


def _kept(choices: Sequence[int], guessed: Sequence[int], ends: Collection[int]) -> DraftRound:
    """Return the choices up to the first that was not guessed, or that ends the sequence."""
    right = 0
    while right < len(guessed) and guessed[right] == choices[right]:
        right += 1
    tokens = list(choices[: right + 1])
    stop = next((place for place, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return DraftRound(tokens[: stop + 1], len(guessed), stop + 1 == len(tokens))


class _BaseAndDraft:
    """A base and its draft, with what they have read."""

    def __init__(self, base: GPT | ParallelGPT, draft: DraftModel, num_slots: int, capacity: int) -> None:
        self.model, self.draft = base, draft
        self.base = Cache(base.layers, num_slots, capacity)
        # Of all layers: a rank that stops alone would leave the others waiting.
        if not (base.least(int(self.base.reversible)) if isinstance(base, ParallelGPT) else self.base.reversible):
            raise ConfigurationError(
                "some layers of the base keep one state for all earlier tokens (Mamba, convolutions), which cannot "
                "forget a wrong guess. Generate without a draft."
            )
        self.drafts = Cache({"layer": draft.layer}, num_slots, capacity)
        self.places = [f"layers.{after - 1}" for after in draft.config.auxiliary_layers]
        self.device = base.device if isinstance(base, ParallelGPT) else next(base.parameters()).device
        self.ids = torch.tensor(draft.config.draft_ids, device=self.device)

    def check(
        self, given: dict[int, list[int]], guessed: dict[int, list[int]]
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Run new tokens and guesses through the base.

        Returns:
            by slot, logits ``[g + 1, V]`` after the newest token and after each guess, and hidden states ``[n + g, .]``
            for the draft.
        """
        counts = [len(new) + len(guessed[slot]) for slot, new in given.items()]
        sequences = self.base.extend(list(given), counts, self.device)
        # Only the newest token of a prompt needs logits.
        ends = torch.tensor(counts).cumsum(0).tolist()
        rows: list[int] = []
        for end, slot in zip(ends, given, strict=True):
            rows += range(end - len(guessed[slot]) - 1, end)
        tokens = [token for slot, new in given.items() for token in (*new, *guessed[slot])]
        logits, states = self._run(
            torch.tensor(tokens, device=self.device), sequences, torch.tensor(rows, device=self.device)
        )
        shares = [len(guessed[slot]) + 1 for slot in given]
        return (
            dict(zip(given, torch.split(logits, shares), strict=True)),
            dict(zip(given, torch.split(states, counts), strict=True)),
        )

    def _run(self, tokens: Tensor, sequences: PackedSequences, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the base's logits of these rows, and its hidden states at the draft's places."""
        if isinstance(self.model, ParallelGPT):
            return self.model.with_states(tokens, sequences, self.places, states=self.base.states, rows=rows)
        with keeping(self.model, self.places) as kept:
            logits = self.model(tokens, sequences, states=self.base.states, rows=rows).logits
        return logits, torch.cat([kept[KEPT + name] for name in self.places], -1)

    def guess(
        self, read: dict[int, list[int]], after: dict[int, int], states: dict[int, Tensor], counts: dict[int, int]
    ) -> dict[int, list[int]]:
        """Return guesses for each slot.

        Args:
            read: the tokens that the base has read since the last call.
            after: the token that follows them.
            states: the base's hidden states ``[n, .]`` of these tokens.
            counts: how many guesses to make.
        """
        found: dict[int, list[int]] = {slot: [] for slot in read}
        if not read:
            return found
        # At each place the draft reads the token that follows.
        following = [token for slot, tokens in read.items() for token in (*tokens[1:], after[slot])]
        hidden = self.draft.fuse(torch.cat(list(states.values())))
        lengths = [len(tokens) for tokens in read.values()]
        hidden = self._step(list(read), lengths, hidden, following)
        hidden = hidden[(torch.tensor(lengths).cumsum(0) - 1).tolist()]
        real = list(self.drafts.lengths)
        slots = list(read)
        for step in range(max(counts.values())):
            # A sequence that needs no more guesses leaves the batch.
            going = [place for place, slot in enumerate(slots) if counts[slot] > step]
            slots, hidden = [slots[place] for place in going], hidden[going]
            if step:
                # Its own output takes the place of the base's hidden states.
                hidden = self._step(slots, [1] * len(slots), hidden, [found[slot][-1] for slot in slots])
            top = self.draft.head.top(hidden)
            for slot, token in zip(slots, (self.ids[top] if len(self.ids) else top).tolist(), strict=True):
                found[slot].append(token)
        for slot in read:
            self.drafts.truncate(slot, real[slot])
        return found

    def _step(self, slots: list[int], counts: list[int], hidden: Tensor, following: list[int]) -> Tensor:
        sequences: PackedSequences = self.drafts.extend(slots, counts, self.device)
        ids = torch.tensor(following, device=self.device)
        if isinstance(self.model, ParallelGPT):
            embedded = self.model.embed(ids)
        else:
            assert self.model.embed is not None
            embedded = self.model.embed.word(ids)
        return self.draft.follow(hidden, embedded, sequences, self.drafts.states["layer"])


# Loading a draft


def load_draft(path: str | os.PathLike[str], base: GPT | ParallelGPT, tokenizer: Tokenizer | None = None) -> DraftModel:
    """Load a draft for a model in memory, on its device and in its dtype. Each rank of a divided base loads it whole.

    Args:
        path: a checkpoint of a draft, or a run's folder (its newest checkpoint).
        base: the model that it serves.
        tokenizer: that of the base.

    Raises:
        CheckpointError: the checkpoint is missing or incomplete.
        ConfigurationError: it holds no draft, or the draft does not fit the base.
        DataError: the draft was trained with another tokenizer.
    """
    if is_draft(path):
        raise ConfigurationError(
            f"{path} is a draft for serving engines; make a checkpoint of it first: megalight convert {path} OUTPUT"
        )
    path = latest_checkpoint(path)
    opened = checkpoint.open(path)
    if description(opened)["family"] != "eagle":
        raise ConfigurationError(
            f"{path} holds a {description(opened)['family']} model, and a draft is of the family eagle; train one with "
            "EagleModule."
        )
    theirs = companions_of(path).get(TOKENIZER)
    if tokenizer is not None and theirs is not None:
        found = Tokenizer.from_json(theirs.decode()).identity
        if found != tokenizer.identity:
            raise DataError(
                f"the draft in {path} was trained with another tokenizer than that of its base, so ids do not mean the "
                "same to it; name the draft of this base."
            )
    weight = next(base.parameters(), None)
    dtype, device = (None, None) if weight is None else (weight.dtype, weight.device)
    if isinstance(base, ParallelGPT):
        # A stage may have no weights; the first has the embedding.
        dtype, device = base.agree(dtype), base.device
    draft = saved_model(opened, device or "cpu", dtype).root
    assert isinstance(draft, DraftModel)
    check_draft(base, draft)
    return draft.eval()
