"""Packed conversations train the same model under every layout: the loss is a mean over all counted tokens."""

from __future__ import annotations

import functools
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalight.data.chat.module import SFTDataModule
from megalight.data.corpus import CorpusMeta, loss_prefix
from megalight.data.indexed import IndexedWriter
from megalight.models.gpt.model import GPT
from megalight.models.gpt.module import GPTModule
from megalight.nn.init import initialize
from megalight.strategies import MegatronStrategy
from megalight.types import PackedSequences, TokenBatch
from tests.strategies.training import (
    ADAM,
    BASE,
    CLIP,
    SEED,
    Gradients,
    Losses,
    assert_same_gradients,
    assert_same_run,
    by_hand,
    gathered,
)
from tests.support.environment import trainer
from tests.support.workers import run

STEPS, ROWS, LENGTH = 2, 4, 32
CONFIG = replace(BASE, max_sequence_length=LENGTH)


def write(folder: Path) -> str:
    """Conversations of 2 to 16 tokens, of which few or many count."""
    random = np.random.default_rng(5)
    lengths = random.integers(2, 17, 40)
    tokens = random.integers(0, BASE.vocab_size, lengths.sum())
    loss = np.concatenate([random.random(n) < share for n, share in zip(lengths, random.random(40), strict=True)])
    prefix = folder / "chat"
    for path, values, dtype in ((prefix, tokens, "uint16"), (loss_prefix(prefix), loss, "uint8")):
        with IndexedWriter(path, dtype) as writer:
            writer.add_documents(values.astype(dtype), lengths)
    facts = ("uint16", BASE.vocab_size, BASE.vocab_size - 1, 0.0, "none", None, -1, False, 1, "chat", int(loss.sum()))
    CorpusMeta(40, int(lengths.sum()), *facts).save(prefix)
    return str(prefix)


def data(prefix: str) -> SFTDataModule:
    return SFTDataModule(data=prefix, split="1", global_batch_size=ROWS, sequence_length=LENGTH, train_samples=16)


def fit(prefix: str, **layout: Any) -> dict[str, Any]:
    strategy = MegatronStrategy(micro_batch_size=1, **layout)
    losses, gradients = Losses(), Gradients()
    module = GPTModule(CONFIG, optimizer=ADAM, seed=SEED)
    options = {"max_steps": STEPS, "gradient_clip_val": CLIP, "limit_val_batches": 0}
    trainer(strategy, callbacks=[losses, gradients], **options).fit(module, data(prefix))
    final = gathered(strategy, module)
    found = {"losses": losses.losses, "norms": losses.norms, "initial": losses.initial, "final": final}
    return {**found, "gradients": gradients.first}


@functools.cache
def prepared() -> tuple[str, tuple[TokenBatch, ...]]:
    prefix = write(Path(tempfile.mkdtemp()))
    module = data(prefix)
    module.samples["train"] = STEPS * ROWS  # what a run of so many steps reads
    module.setup("fit")
    return prefix, tuple(module.train_dataloader())


@functools.cache
def expected() -> dict[str, Any]:
    return by_hand(CONFIG, STEPS, batches=lambda step: prepared()[1][step])


@pytest.mark.parametrize(
    "layout",
    [
        {"world": 2},
        {"world": 2, "pipeline_parallel": 2},
        {"world": 2, "context_parallel": 2},
        {"world": 2, "tensor_parallel": 2, "sequence_parallel": True},
        {"world": 2, "tensor_parallel": 2},
        pytest.param({"world": 4, "tensor_parallel": 2, "pipeline_parallel": 2}, marks=pytest.mark.full),
        pytest.param({"world": 4, "pipeline_parallel": 2}, marks=pytest.mark.full),
        pytest.param({"world": 4, "context_parallel": 2, "tensor_parallel": 2}, marks=pytest.mark.full),
    ],
    ids=lambda layout: "-".join(f"{key}{value}" for key, value in layout.items()),
)
def test_the_loss_is_a_mean_over_the_tokens_of_the_step(layout: dict[str, Any]) -> None:
    prefix, (batch, *_) = prepared()
    per_row = batch.loss_mask.sum(1).tolist()
    assert len(set(per_row)) > 1  # replicas count different numbers of tokens
    assert max(map(len, batch.document_lengths or ())) > 2
    assert batch.rows is not None  # tokens without a loss are skipped, where a rank has whole sequences
    assert len(batch.rows) < batch.tokens.numel() / 2
    layout = dict(layout)
    found = run(_rank, layout.pop("world"), prefix, layout, timeout=240)[0]
    assert_same_run(found, expected())
    assert_same_gradients(found["gradients"], expected()["gradients"])


def _rank(prefix: str, layout: dict[str, Any]) -> dict[str, Any]:
    return fit(prefix, **layout)


def test_a_packed_conversation_does_not_see_its_neighbors() -> None:
    _, (batch, *_) = prepared()
    model = GPT(CONFIG).double()
    initialize(model, SEED)
    with torch.no_grad():
        packed = model(batch.tokens.reshape(-1), batch.sequences, labels=batch.labels.reshape(-1)).losses
        at = 0
        for length in itertools.chain.from_iterable(batch.document_lengths or ()):
            here = slice(at, at + length)
            tokens, labels = batch.tokens.reshape(-1)[here], batch.labels.reshape(-1)[here]
            alone = model(tokens, PackedSequences.of_lengths([length]), labels=labels).losses
            torch.testing.assert_close(packed[here], alone, rtol=1e-12, atol=1e-12)
            at += length
        assert at == len(packed)
