"""Runs in which nothing is even: the last micro-batch is smaller, batches accumulate, and some weights are frozen."""

from __future__ import annotations

import fnmatch
import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from megalight.models.gpt import GPT
from megalight.models.gpt.module import GPTModule
from megalight.nn.init import initialize
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.parallel.tensor.overlap.spec import TensorOptions
from megalight.parallel.transform import ModelTransform
from megalight.strategies import DataParallelOptions, MegatronStrategy, PipelineOptions
from megalight.types import TokenBatch
from tests.parallel.data_parallel.stale import stale_gradients
from tests.strategies.training import (
    ADAM,
    CLIP,
    CONFIGS,
    SEED,
    Gradients,
    Losses,
    assert_same_gradients,
    assert_same_run,
    canonical,
    gathered,
    whole,
)
from tests.support.environment import trainer
from tests.support.workers import run

STEPS = 2
LENGTH = 13
DOCUMENTS = ((5, 8), (13,), (1, 3, 9), (9, 4), (2, 11), (13,), (6, 7), (12, 1), (4, 4, 5), (13,))


@dataclass(frozen=True)
class Freeze(ModelTransform):
    """Freezes parameters by name."""

    name: ClassVar[str] = "freeze in tests"
    patterns: tuple[str, ...] = ()

    def change(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if any(fnmatch.fnmatch(name, pattern) for pattern in self.patterns):
                parameter.requires_grad_(False)


@dataclass(frozen=True)
class Run:
    """What is trained.

    Attributes:
        config: name of a model.
        layers: number of its layers.
        rows: samples of a global batch.
        accumulate: batches of an update; its gradient is the mean of theirs.
        frozen: globs over names of parameters.
    """

    config: str
    layers: int
    rows: int
    accumulate: int
    frozen: tuple[str, ...]

    def batch(self, index: int) -> TokenBatch:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, CONFIGS[self.config].vocab_size, (self.rows, LENGTH + 1), generator=generator)
        counts = torch.linspace(0.2, 1, self.rows)[:, None]  # rows count differently
        mask = (torch.rand(self.rows, LENGTH, generator=generator) < counts).float()
        return TokenBatch(ids[:, :-1], ids[:, 1:], mask, DOCUMENTS[: self.rows])


class Module(GPTModule):
    """Brings its own data."""

    run: Run

    def train_dataloader(self) -> DataLoader[Any]:
        share = self.trainer.strategy.distributed_sampler_kwargs
        batches = [self.run.batch(index) for index in range(STEPS * self.run.accumulate)]
        replicas = share["num_replicas"]
        rows = [batch.split(len(batch) // replicas)[share["rank"]] for batch in batches]
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]


def config_of(what: Run) -> Any:
    return replace(CONFIGS[what.config], num_layers=what.layers)


def train(what: Run, level: str, layout: dict[str, Any]) -> dict[str, Any]:
    how = MegatronStrategy(data_parallel=DataParallelOptions(level=level, bucket_size=700), **layout)  # type: ignore[arg-type]
    losses, gradients = Losses(), Gradients()
    module = Module(config_of(what), optimizer=ADAM, seed=SEED)
    module.run = what
    module.transforms.append(Freeze(what.frozen))
    runner = trainer(
        how,
        callbacks=[losses, gradients],
        max_steps=STEPS,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        limit_val_batches=0,
        accumulate_grad_batches=what.accumulate,
    )
    with stale_gradients():
        runner.fit(module)
    # Each batch tells the norm of the update before it.
    norms = [losses.norms[0], losses.norms[-1]]
    found = {"losses": losses.losses, "norms": norms, "initial": losses.initial, "final": gathered(how, module)}
    return {**found, "gradients": gradients.first}


@functools.cache
def by_hand(what: Run) -> dict[str, Any]:
    """The same run on one device with whole batches, in float64."""
    model = GPT(config_of(what)).double()
    Freeze(what.frozen).change(model)
    initialize(model, SEED, "model.")
    initial, losses, norms, gradients = whole(model), [], [], {}
    optimizer, _ = ADAM.build(model.named_parameters(), STEPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(what.accumulate):
            batch = what.batch(step * what.accumulate + part)
            output = model(batch.tokens.flatten(), batch.sequences, labels=batch.labels.flatten())
            loss = (output.losses * batch.loss_mask.flatten().double()).sum() / batch.loss_mask.sum()
            (loss / what.accumulate).backward()
            losses.append(float(loss.detach()))
        named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        gradients = gradients or canonical(model, named)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return {"losses": losses, "norms": norms, "gradients": gradients, "initial": initial, "final": whole(model)}


ROWS: list[Any] = [
    # The last micro-batch of each replica has one sample.
    (
        Run("tied", 3, rows=7, accumulate=2, frozen=("layers.0.*",)),
        2,
        "optim",
        {
            "micro_batch_size": 3,
            "pipeline_parallel": 2,
            "pipeline_layout": "Et|ttL",
            "pipeline": PipelineOptions(schedule="zero_bubble"),
        },
    ),
    pytest.param(
        Run("gqa", 2, rows=10, accumulate=2, frozen=("embed.*", "layers.1.mlp.*")),
        4,
        "optim_grads_params",
        {
            "micro_batch_size": 2,
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "tensor": TensorOptions(overlap="pipelined", pieces=2),
        },
        marks=pytest.mark.full,
    ),
    *[
        pytest.param(*row, marks=pytest.mark.full)
        for row in [
            (
                Run("gpt2", 2, rows=5, accumulate=3, frozen=("*norm*",)),
                2,
                "optim_grads",
                {
                    "micro_batch_size": 2,
                    "context_parallel": 2,
                    "context": ContextOptions("ring"),
                    "recompute": RecomputeOptions(
                        granularity="selective", modules=("mlp_norm", "mlp.act", "attention.inner")
                    ),
                },
            ),
            (
                Run("tied", 4, rows=10, accumulate=3, frozen=("*.attention.*",)),
                4,
                "optim_grads",
                {
                    "micro_batch_size": 3,
                    "pipeline_parallel": 2,
                    "virtual_pipeline": 2,
                    "recompute": RecomputeOptions(granularity="full", num_layers=1),
                },
            ),
            (
                Run("tied", 3, rows=6, accumulate=2, frozen=("embed.*",)),
                4,
                "no_shard",
                {"micro_batch_size": 4, "tensor_parallel": 2, "pipeline_parallel": 2, "pipeline_layout": "Ett|tL"},
            ),
            (
                Run("mha", 2, rows=9, accumulate=2, frozen=("layers.0.*", "layers.1.mlp.*")),
                3,
                "optim_grads_params",
                {"micro_batch_size": 2},
            ),
        ]
    ],
]


def ident(value: Any) -> str:
    return value.config if isinstance(value, Run) else "layout" if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("what", "ranks", "level", "layout"), ROWS, ids=ident)
def test_odd_runs_equal_one_device(what: Run, ranks: int, level: str, layout: dict[str, Any]) -> None:
    found = run(train, ranks, what, level, layout, timeout=240)
    expected = by_hand(what)
    assert all(rank["losses"] == found[0]["losses"] for rank in found)
    assert_same_run(found[0], expected)
    assert_same_gradients(found[0]["gradients"], expected["gradients"])
    # What is frozen stays as it was.
    for name, value in expected["initial"].items():
        if any(fnmatch.fnmatch(name.removeprefix("model."), pattern) for pattern in what.frozen):
            assert (found[0]["final"][name] == value).all(), name
