"""Acceptance length: guesses at all places at once are those of drafting token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.inference import acceptance
from megalight.inference.acceptance import acceptance_length, auxiliary_states, drafted
from megalight.models.eagle import DraftModel, EagleConfig
from megalight.models.gpt import GPT, GPTConfig
from megalight.nn import LayerContext, Lineage
from megalight.nn.init import initialise
from megalight.types import PackedSequences

SMALL = GPTConfig(num_layers=3, hidden_size=16, num_heads=2, vocab_size=31, max_sequence_length=48)
IDS = tuple(range(0, 31, 2))


def models(ids: tuple[int, ...] = IDS) -> tuple[GPT, DraftModel]:
    base = GPT(SMALL).double()
    draft = DraftModel(EagleConfig(auxiliary_layers=(2, 1), draft_ids=ids, std=0.4).beside(SMALL)).double()
    for seed, model in enumerate((base, draft)):
        initialise(model, seed)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(4)
    return base, draft


def token_by_token(base: GPT, draft: DraftModel, text: Tensor, place: int, guesses: int) -> list[int]:
    """One round with an ordinary causal pass over real and guessed tokens for each guess."""
    known = text[: place + 1]
    states = auxiliary_states(base, (2, 1), known, PackedSequences.of_uniform(1, len(known), text.device))
    hidden, tokens = draft.fuse(states), text[1 : place + 2].tolist()
    for _ in range(guesses):
        sequences = PackedSequences.of_uniform(1, len(tokens), text.device)
        assert draft.rotary is not None
        context = LayerContext(sequences, {"rotary": draft.rotary(sequences.rotary_positions, torch.double)})
        assert base.embed is not None
        out = draft.layer(hidden, base.embed.word(torch.tensor(tokens)), context, Lineage())
        assert draft.head is not None
        tokens.append(IDS[int(draft.head(out[-1:]).argmax())])
        hidden = torch.cat([hidden, out[-1:]])
    return tokens[-guesses:]


@torch.no_grad()
def test_guesses_at_all_places_are_those_of_drafting_token_by_token() -> None:
    base, draft = models()
    text = torch.randint(31, (9,), generator=torch.Generator().manual_seed(3))
    found = torch.stack(drafted(base, draft, text, 4)).T
    for place in range(8):
        assert found[place].tolist() == token_by_token(base, draft, text, place, 4)
    assert len(found.unique()) > 3


@pytest.mark.parametrize(("right", "expected"), [(0, 1.0), (1, 2.0), (4, 5.0)])
def test_a_round_yields_its_right_guesses_and_one_token(
    right: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def guess(base: GPT, draft: DraftModel, text: Tensor, guesses: int) -> list[Tensor]:
        return [text.roll(-2 - step) if step < right else torch.full_like(text, -1) for step in range(guesses)]

    monkeypatch.setattr(acceptance, "drafted", guess)
    base, draft = models()
    assert acceptance_length(base, draft, [[1, 2, 3]], max_new_tokens=20) == pytest.approx(expected)


@pytest.mark.parametrize(("prompts", "new"), [([], 8), ([[1, 2, 3]], 1)])
def test_an_acceptance_length_of_no_rounds_is_refused(prompts: list[list[int]], new: int) -> None:
    message = f"{len(prompts)} prompts with max_new_tokens={new} hold no whole round.*at least max_new_tokens=6"
    with pytest.raises(ConfigurationError, match=message):
        acceptance_length(*models(), prompts, max_new_tokens=new)
