"""A draft that has learned beside its base yields longer rounds than one that has not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megalight.inference import load_model
from megalight.inference.acceptance import acceptance_length
from megalight.inference.speculator import load_draft
from megalight.models.eagle import DraftModel, EagleConfig, EagleModule
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.nn.init import initialize
from megalight.optim import AdamConfig
from megalight.strategies import MegatronStrategy
from megalight.types import TokenBatch
from tests.support.environment import trainer
from tests.support.workers import run

SMALL = GPTConfig(num_layers=3, hidden_size=32, num_heads=2, vocab_size=31, max_sequence_length=64)
ADAM = AdamConfig(lr=1e-2)


def texts(count: int, length: int) -> torch.Tensor:
    """After each token comes one that is fixed for it."""
    draw = torch.Generator().manual_seed(0)
    following, rows = torch.randperm(31, generator=draw), [torch.randint(31, (count,), generator=draw)]
    for _ in range(length - 1):
        rows.append(following[rows[-1]])
    return torch.stack(rows, 1)


def fit(module: Any, steps: int, folder: Path) -> None:
    rows = texts(16 * steps, 17).split(16)
    batches = [TokenBatch(row[:, :-1], row[:, 1:], torch.ones(16, 16)) for row in rows]
    runner = trainer(MegatronStrategy(), max_steps=steps, precision="32-true", use_distributed_sampler=False)
    runner.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    runner.save_checkpoint(folder)


def lengths(folder: Path) -> tuple[float, float]:
    fit(GPTModule(SMALL, ADAM), 80, folder / "base")
    fit(EagleModule(folder / "base", EagleConfig(ffn_hidden_size=64), ADAM), 60, folder / "draft")
    base = load_model(folder / "base")
    draft = load_draft(folder / "draft", base)
    fresh = DraftModel(draft.config)
    initialize(fresh, 0)
    prompts = texts(40, 8)[-8:].tolist()
    first, last = (acceptance_length(base, each, prompts, max_new_tokens=24) for each in (fresh, draft))
    return first, last


@pytest.mark.full
def test_training_makes_rounds_longer(tmp_path: Path) -> None:
    ((fresh, trained),) = run(lengths, 1, tmp_path)
    assert fresh < 1.5
    assert trained > 3
