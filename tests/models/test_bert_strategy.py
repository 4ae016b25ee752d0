"""BERT under MegatronStrategy: every layout trains the same model as one device by hand."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from megalight.data.bert.batch import BertBatch
from megalight.data.bert.module import BertDataModule
from megalight.data.prepare import prepare
from megalight.models.bert import Bert, BertConfig
from megalight.models.bert.module import BertModule
from megalight.nn.init import initialize
from megalight.parallel.context.attention import ContextOptions
from megalight.strategies import DataParallelOptions, MegatronStrategy
from tests.data.bert.conftest import SPECIALS, texts
from tests.strategies.training import ADAM, CLIP, SEED, From, Losses, assert_same_run, gathered, whole
from tests.support.environment import trainer
from tests.support.workers import run

BASE = BertConfig(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    vocab_size=101,
    max_sequence_length=24,
    ffn_hidden_size=48,
)
CONFIGS = {
    "order": BASE,
    "masked_lm": replace(BASE, sentence_order=False),
    "deep": replace(BASE, num_layers=4),
    "untied": replace(BASE, tie_embeddings=False, activation="relu"),
}
STEPS = 3


def global_batch(step: int, samples: int = 6) -> BertBatch:
    """Samples of different lengths, of which different parts are masked."""
    generator = torch.Generator().manual_seed(100 + step)
    lengths = tuple(torch.randint(5, 23, (samples,), generator=generator).tolist())
    count = sum(lengths)
    tokens, labels = (torch.randint(0, BASE.vocab_size, (count,), generator=generator) for _ in range(2))
    chance = torch.linspace(0.1, 0.6, samples).repeat_interleave(torch.tensor(lengths))
    masked = torch.rand(count, generator=generator) < chance
    types = torch.cat([(torch.arange(n) >= n // 2).long() for n in lengths])
    order = torch.randint(0, 2, (samples,), generator=generator)
    return BertBatch(tokens, types, labels.masked_fill(~masked, -100), order, lengths).with_rows()


class Shares(torch.utils.data.Dataset[BertBatch]):
    """This rank's share of each step's global batch."""

    def __init__(self, replicas: int, rank: int) -> None:
        self.replicas, self.rank = replicas, rank

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> BertBatch:
        batch = global_batch(step)
        return batch.split(len(batch) // self.replicas)[self.rank]


class WithData(BertModule):
    """A BertModule that brings its own data."""

    def train_dataloader(self) -> DataLoader[Any]:
        share = self.trainer.strategy.distributed_sampler_kwargs
        rows = Shares(share["num_replicas"], share["rank"])
        return DataLoader(rows, batch_size=None, sampler=From(self.trainer.global_step, STEPS))


def fit(name: str, **strategy_options: Any) -> dict[str, Any]:
    """Train in every rank of the pool; losses, norms, initial and final weights, and metrics."""
    strategy = MegatronStrategy(data_parallel=DataParallelOptions(), **strategy_options)
    losses = Losses()
    module = WithData(CONFIGS[name], optimizer=ADAM, seed=SEED)
    options = {"use_distributed_sampler": False, "gradient_clip_val": CLIP, "max_steps": STEPS}
    runner = trainer(strategy, callbacks=[losses], limit_val_batches=0, **options)
    runner.fit(module)
    report = {key: float(value) for key, value in strategy.report.metrics.items()}
    final = gathered(strategy, module)
    return {
        "losses": losses.losses,
        "norms": losses.norms,
        "initial": losses.initial,
        "final": final,
        "report": report,
    }


@functools.cache
def by_hand(name: str) -> dict[str, Any]:
    """The same run with torch alone: one device, whole batches, torch's own AdamW and clipping."""
    model = Bert(CONFIGS[name]).double()
    initialize(model, SEED, "model.")
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    rows = [{"params": decayed, "weight_decay": ADAM.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(rows, lr=ADAM.lr, betas=ADAM.betas, eps=ADAM.eps)
    initial = whole(model)
    losses, norms, report = [], [], {}
    for step in range(STEPS):
        batch = global_batch(step)
        output = model(batch.tokens, batch.sequences, batch.token_types)
        loss = F.cross_entropy(output.logits, batch.labels)
        objective = loss
        if output.order is not None:
            order = F.cross_entropy(output.order, batch.order)
            right = (output.order.argmax(-1) == batch.order).double().mean()
            report = {"order_loss": float(order.detach()), "order_accuracy": float(right)}
            objective = loss + order
        optimizer.zero_grad()
        objective.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "initial": initial, "final": whole(model), "report": report}


LAYOUTS = [
    ("order", 1, {"micro_batch_size": 4}),
    ("order", 2, {"micro_batch_size": 2}),
    ("masked_lm", 2, {"tensor_parallel": 2, "sequence_parallel": True, "micro_batch_size": 3}),
    ("order", 2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    ("deep", 2, {"pipeline_parallel": 2, "virtual_pipeline": 2, "micro_batch_size": 1}),
    ("order", 2, {"context_parallel": 2, "context": ContextOptions("ring"), "micro_batch_size": 4}),
    ("untied", 2, {"tensor_parallel": 2, "sequence_parallel": True, "micro_batch_size": 3}),
]
FULL = [
    ("order", 2, {"context_parallel": 2, "micro_batch_size": 4}),
    ("order", 2, {"tensor_parallel": 2, "sequence_parallel": True, "micro_batch_size": 4}),
    ("order", 1, {}),
    ("order", 2, {"tensor_parallel": 2, "micro_batch_size": 4}),
    ("order", 4, {"tensor_parallel": 2, "sequence_parallel": True, "micro_batch_size": 2}),
    (
        "deep",
        4,
        {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2, "virtual_pipeline": 2}
        | {"micro_batch_size": 1},
    ),
    ("order", 4, {"tensor_parallel": 2, "sequence_parallel": True, "context_parallel": 2, "micro_batch_size": 4}),
    ("order", 4, {"pipeline_parallel": 2, "context_parallel": 2, "micro_batch_size": 2}),
]
"""Two axes at once."""


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(each, marks=pytest.mark.full) for each in FULL)], ids=str)
def test_layout_trains_the_same_model(layout: tuple[str, int, dict[str, Any]]) -> None:
    name, ranks, options = layout
    found = run(_rank, ranks, name, options, timeout=240)
    expected = by_hand(name)
    for rank in found:
        assert rank["losses"] == found[0]["losses"], "ranks report different losses"
    assert_same_run(found[0], expected)
    assert found[0]["report"].keys() == expected["report"].keys()
    for key, value in expected["report"].items():
        np.testing.assert_allclose(found[0]["report"][key], value, rtol=1e-9)


def _rank(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return fit(name, **options)


def _with_data(prefix: str, options: dict[str, Any]) -> dict[str, float]:
    """Two steps of training, then validation, from token files."""
    data = BertDataModule(data=prefix, split="2,1,0", global_batch_size=4, sequence_length=24)
    module = BertModule(replace(BASE, vocab_size=320), optimizer=ADAM, seed=SEED)
    runner = trainer(MegatronStrategy(**options), max_steps=2, gradient_clip_val=CLIP)
    runner.fit(module, datamodule=data)
    return {name: float(value) for name, value in runner.callback_metrics.items()}


def test_training_and_validation_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    report = prepare(
        [str(tmp_path / "a.jsonl")],
        tmp_path / "a",
        train_tokenizer=True,
        vocab_size=320,
        special_tokens=SPECIALS,
        split_sentences=True,
        progress=False,
    )
    alone = run(_with_data, 1, report.prefix, {})[0]
    assert {"val_loss", "val_order_loss", "val_order_accuracy"} <= alone.keys()
    for options in ({"micro_batch_size": 1}, {"tensor_parallel": 2, "sequence_parallel": True}):
        for rank in run(_with_data, 2, report.prefix, options):
            assert rank == pytest.approx(alone, rel=1e-9)
