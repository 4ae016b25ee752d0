"""A run goes on from Adam to an optimizer of whole matrices, and back: Adam keeps what it updates still."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megalight.models.gpt import GPT
from megalight.nn.canonical import parts
from megalight.nn.init import initialize
from megalight.optim import AdamConfig, CosineDecay
from tests.optim.test_muon import CONFIG, MUON, STEPS, orthogonalized, resumed
from tests.optim.test_shampoo import CONFIG as SHAMPOO
from tests.strategies.test_experts import PLAIN
from tests.strategies.training import CLIP, SEED, canonical, global_batch, whole
from tests.support.workers import run

ADAM = replace(CONFIG, muon=None)
TP = {"tensor_parallel": 2, "sequence_parallel": True}
FIRST = 2
"""Steps of the first optimizer."""


def by_hand(first: str) -> dict[str, Any]:
    """Return all weights after a run that begins with ``first``, and goes on with the other one."""
    model = GPT(PLAIN).double()
    initialize(model, SEED, "model.")
    named = dict(model.named_parameters())
    matrices = {name for name, p in named.items() if MUON.takes(name, p)}
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=ADAM.lr,
        betas=ADAM.betas,
        eps=ADAM.eps,
    )
    momenta: dict[str, Any] = {}
    for step in range(STEPS):
        batch = global_batch(step)
        output = model(batch.tokens.reshape(-1), batch.sequences, labels=batch.labels.reshape(-1))
        model.zero_grad()
        ((output.losses * batch.loss_mask.reshape(-1).double()).sum() / batch.loss_mask.sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        gradients = canonical(model, {name: p.grad for name, p in named.items()})
        if (step < FIRST) == (first == "muon"):
            for part in parts(model):
                if part.parameter not in matrices:
                    continue
                weight = named[part.parameter].detach().view(-1)[part.start :][: int(np.prod(part.shape))]
                gradient = torch.from_numpy(gradients["model." + part.name])
                momenta[part.name] = momentum = 0.95 * momenta.get(part.name, 0.0) + 0.05 * gradient
                update = orthogonalized(0.95 * momentum + 0.05 * gradient) * 0.2 * max(part.shape) ** 0.5
                weight.mul_(1 - MUON.lr * MUON.weight_decay).sub_(update.view(-1), alpha=MUON.lr)
            for name in matrices:
                named[name].grad = None
        adam.step()
    return whole(model)


@pytest.mark.parametrize("first", [pytest.param("adam", marks=pytest.mark.full), "muon"])
def test_moments_stay_where_adam_updates_still(first: str, tmp_path: Path) -> None:
    configs = {"adam": ADAM, "muon": CONFIG}
    second = configs[{"adam": "muon", "muon": "adam"}[first]]
    path = str(tmp_path / "first.ckpt")
    run(resumed, 2, TP, "optim", FIRST, None, path, configs[first])
    final = run(resumed, 1, {}, "optim", STEPS, path, "", second)[0]
    for name, value in by_hand(first).items():
        error = np.linalg.norm(final[name] - value) / np.linalg.norm(value)
        assert error <= 1e-9, f"{name} differs by {error:.1e}"


def _said(optimizer: AdamConfig, steps: int, path: str, resume: bool) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megalight.checkpoint.run")
    logger.addHandler(handler)
    resumed({}, "optim", steps, path if resume else None, path, optimizer)
    logger.removeHandler(handler)
    return said


def test_it_says_what_begins_anew_and_schedules_go_on(tmp_path: Path) -> None:
    path = str(tmp_path / "first.ckpt")
    schedule = CosineDecay(warmup=1, steps=10)
    run(_said, 1, replace(ADAM, schedule=schedule), 2, path, False)
    said = run(_said, 1, replace(SHAMPOO, schedule=schedule), 3, path, True)[0]
    assert "was trained with Adam, and this run uses Shampoo: the state of " in said[0]
    # The same optimizer now, whose state must be whole.
    assert not run(_said, 1, replace(SHAMPOO, schedule=schedule), 4, path, True)[0]
