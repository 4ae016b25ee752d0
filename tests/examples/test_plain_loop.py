"""The example without Lightning: the same losses and weights on any layout as on one device."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import numpy as np
import pytest
import torch

from megalight.models.gpt import GPT
from megalight.nn.init import initialize
from tests.strategies.training import whole
from tests.support.source import ROOT
from tests.support.workers import run

STEPS = 3


def _example() -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return importlib.import_module("plain_loop")
    finally:
        sys.path.pop(0)


@functools.cache
def by_hand() -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of torch alone: one device, whole batches."""
    example = _example()
    model = GPT(example.CONFIG).double()
    initialize(model, 1, "model.")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    task, losses = example.NextToken(), []
    for step in range(STEPS):
        batch = example.global_batch(step)
        loss = task.loss_step(task.forward_step(model, batch), batch).sum / task.loss_tokens(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, whole(model)


def _errors(layout: dict[str, Any]) -> tuple[list[float], float]:
    """This rank's losses, and the largest relative error of a part of a weight."""
    example = _example()
    training, losses = example.train(STEPS, dtype=torch.float64, **layout)
    wanted, errors = by_hand()[1], []
    for name, tensor in training.model.tensors().items():
        for piece in training.model.specs[name].pieces:
            value = wanted[piece.name][piece.box]
            errors.append(np.linalg.norm(piece.view(tensor.detach()).numpy() - value) / np.linalg.norm(value))
    return losses, float(max(errors))


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, {}),
        (4, {"tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True}),
        pytest.param(4, {"pipeline_parallel": 2, "virtual_pipeline": 2}, marks=pytest.mark.full),
        pytest.param(4, {"context_parallel": 2}, marks=pytest.mark.full),
        pytest.param(8, {"tensor_parallel": 2, "pipeline_parallel": 2}, marks=pytest.mark.full),
    ],
)
def test_any_layout_trains_the_same_model(ranks: int, layout: dict[str, Any]) -> None:
    for losses, error in run(_errors, ranks, layout):
        np.testing.assert_allclose(losses, by_hand()[0], rtol=1e-9)
        assert error <= 1e-9
