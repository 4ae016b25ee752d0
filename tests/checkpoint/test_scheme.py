"""A scheme chooses the views that are written; its name is kept, and an unknown one is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalight import checkpoint
from megalight.checkpoint import SCHEMES, Contents, State, View
from megalight.checkpoint.inspection import describe, render
from megalight.errors import CheckpointError
from tests.checkpoint.layouts import STATES, Layout, Model


def contents(model: Model) -> Contents:
    states = [State(f"optimizer.{name}.", model.states[name], model.shards) for name in STATES]
    return Contents(model.parameters, model.specs, lambda name: model.mesh, states)


def weights_alone(contents: Contents) -> dict[str, View]:
    """Another scheme: no optimizer state."""
    views = SCHEMES["fully_reshardable"](contents)
    return {name: view for name, view in views.items() if not name.startswith("optimizer.")}


def test_the_default_scheme_writes_canonical_tensors(tmp_path: Path) -> None:
    model = Model(Layout(1, 1, "no_shard"), 0, filled=True)
    views = SCHEMES["fully_reshardable"](contents(model))
    assert {name: view.shape for name, view in views.items()} == {
        name.removeprefix("model."): view.shape for name, view in model.views().items()
    }
    checkpoint.save(tmp_path / "a.ckpt", views)
    assert checkpoint.open(tmp_path / "a.ckpt").scheme == "fully_reshardable"
    assert " as fully_reshardable with " in render(describe(tmp_path / "a.ckpt"))


def test_a_checkpoint_is_read_by_the_scheme_that_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCHEMES, "_entries", dict(SCHEMES._entries))
    SCHEMES.register("weights_alone")(weights_alone)
    model = Model(Layout(1, 1, "no_shard"), 0, filled=True)
    checkpoint.save(tmp_path / "a.ckpt", weights_alone(contents(model)), scheme="weights_alone")
    opened = checkpoint.open(tmp_path / "a.ckpt")
    again = Model(Layout(1, 1, "no_shard"), 0, filled=False)
    opened.fill(checkpoint.targets_of(SCHEMES[opened.scheme](contents(again))))
    assert all(torch.equal(again.parameters[name], value) for name, value in model.parameters.items())
    monkeypatch.undo()
    with pytest.raises(
        CheckpointError, match="scheme 'weights_alone'; known: dp_reshardable, fsdp_dtensor, fully_reshardable"
    ):
        checkpoint.open(tmp_path / "a.ckpt")


@pytest.mark.parametrize("scheme", ["fully_reshardable", "dp_reshardable", "fsdp_dtensor"])
def test_states_that_share_names_are_refused(scheme: str) -> None:
    model = Model(Layout(1, 1, "no_shard"), 0, filled=True)
    held = contents(model)
    twice = replace(held, states=[*held.states, replace(held.states[0])])
    with pytest.raises(CheckpointError, match=f"tensors of the state 'optimizer.{STATES[0]}' have names of other"):
        SCHEMES[scheme](twice)
