"""Hidden states that are kept in a forward pass."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from torch import nn

from megalight.models.gpt import GPT
from megalight.models.gpt.config import MultiTokenConfig
from megalight.models.gpt.model import MultiTokenTarget
from megalight.models.hidden import KEPT, keeping, places_of
from megalight.nn.init import initialize
from megalight.types import PackedSequences
from tests.strategies.training import BASE


def test_every_place_of_a_model_has_hidden_states() -> None:
    model = GPT(BASE)
    initialize(model, 0)
    places = places_of(model)
    assert {"layers.0", "layers.1.attention", "layers.1.mlp", "layers.0.mlp_norm", "head.norm"} <= set(places)
    tokens = torch.arange(6)
    with keeping(model, places) as found:
        model(tokens, PackedSequences.of_uniform(1, 6, "cpu"), labels=tokens)
    assert set(found) == {KEPT + name for name in places}
    assert all(state.shape == (6, BASE.hidden_size) and state.requires_grad for state in found.values())
    hooks = [module._forward_hooks for module in model.modules()]
    assert not any(hooks)


def test_the_final_norm_is_kept_of_the_model_and_not_of_further_depths() -> None:
    model = GPT(replace(BASE, mtp=MultiTokenConfig(num_layers=1)))
    initialize(model, 0)
    tokens, sequences = torch.arange(6), PackedSequences.of_uniform(1, 6, "cpu")
    with keeping(model, ["layers.1", "head.norm"]) as found:
        model(tokens, sequences, labels=tokens, later=[MultiTokenTarget(tokens.roll(-1), tokens)])
    assert model.head is not None
    torch.testing.assert_close(found[KEPT + "head.norm"], model.head.norm(found[KEPT + "layers.1"]))


def test_the_carry_goes_on_and_passes_of_other_threads_are_not_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    carry = {KEPT + "before": torch.zeros(1), "hidden": torch.zeros(1)}
    with keeping(model, ["0", "7.inner"], carry) as found:
        model(torch.ones(3, 2))
        kept = found[KEPT + "0"]
        thread = threading.Thread(target=model, args=(torch.zeros(3, 2),))
        thread.start()
        thread.join()
    assert found.keys() == {KEPT + "before", KEPT + "0"}
    assert found[KEPT + "0"] is kept
