"""Losses that arise in layers of any stage: the objective, its gradients and what is logged are those of one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megalight.callbacks import CUDAGraph
from megalight.models.gpt import GPT
from megalight.models.module import Carry
from megalight.nn import LayerContext
from megalight.parallel.recompute import RecomputeOptions
from megalight.strategies import MegatronStrategy, PipelineOptions
from megalight.types import Loss, TokenBatch
from tests.parallel.graphs.tape import Tape
from tests.plugins.fakes import Fakes, pretend_cuda
from tests.plugins.graphed import make_graphed_callables
from tests.strategies.training import (
    ADAM,
    CONFIGS,
    SEED,
    Shares,
    WithData,
    gathered,
    global_batch,
    whole,
)
from tests.support.environment import trainer
from tests.support.workers import run

CONFIG = replace(CONFIGS["gqa"], num_layers=4)


class Penalized(nn.Module):
    """Attention whose output should be small."""

    def __init__(self, attention: nn.Module, *names: str) -> None:
        super().__init__()
        self.attention = attention
        self.names = names
        self.values: dict[str, Tensor] = {}

    def forward(self, hidden: Tensor, context: LayerContext, state: Any = None, memory: Tensor | None = None) -> Tensor:
        out = self.attention(hidden, context, state, memory)
        for place, name in enumerate(self.names, 1):
            self.values[name] = (100 * out / place).square().mean()
            out = context.aux_losses.attach(name, self.values[name], out)
        return out


class WithAuxLosses(WithData):
    """Layers of two stages share a name, and one of them has another loss too."""

    def build_model(self) -> GPT:
        model = super().build_model()
        for index, names in (("1", ["penalty"]), ("2", ["penalty", "other"])):
            layer = model.layers[index]
            layer.attention = Penalized(layer.attention, *names)  # type: ignore[arg-type]
        return model

    def loss_step(self, carry: Carry, batch: TokenBatch) -> Loss:
        loss = super().loss_step(carry, batch)
        return replace(loss, aux_losses={"other": 0.1 * carry["losses"].mean()})


class Kept(pl.Callback):
    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


STEPS = 3
LOGGED = ("train_loss", "train_penalty", "train_other")


def train(options: dict[str, Any], accumulate: int = 1, graphs: dict[str, Any] | None = None) -> dict[str, Any]:
    """A run in every rank; of a plain strategy where there are no options."""
    module = WithAuxLosses(CONFIG, optimizer=ADAM, seed=SEED)
    module.steps = STEPS * accumulate
    if not options:
        module.train_dataloader = module.val_dataloader = lambda: DataLoader(Shares(STEPS, 1, 0), batch_size=None)  # type: ignore[assignment,method-assign]
    kept, callbacks = Kept(), list[pl.Callback]()
    if graphs is not None:
        callbacks = [CUDAGraph(**graphs)]
        callbacks[0].recorder = Tape()  # type: ignore[attr-defined]
    runner = trainer(
        MegatronStrategy(**options) if options else "auto",
        callbacks=[*callbacks, kept],
        use_distributed_sampler=False,
        limit_val_batches=1,
        accumulate_grad_batches=accumulate,
        max_steps=STEPS,
        precision="64-true" if options else "32-true",  # Lightning's own double precision takes no frozen batches
    )
    runner.fit(module)
    assert "val_penalty" not in runner.callback_metrics
    assert module.model is not None
    if graphs is not None:
        assert callbacks[0].replays > 0, callbacks[0].reasons  # type: ignore[attr-defined]
    final = gathered(runner.strategy, module) if options else whole(module.model)
    return {"logged": [[row[name] for name in LOGGED] for row in kept.logged], "final": final}


@functools.cache
def expected(accumulate: int = 1) -> dict[str, Any]:
    """The same by hand: the objective of a global batch is the mean over its tokens plus all auxiliary losses."""
    module = WithAuxLosses(CONFIG, optimizer=ADAM, seed=SEED)
    module.configure_model()
    model = module.model
    assert isinstance(model, GPT)
    model.double()
    optimizer, _ = ADAM.build(model.named_parameters(), STEPS)
    penalized = [part for part in model.modules() if isinstance(part, Penalized)]
    logged = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(accumulate):
            batch = global_batch(step * accumulate + part)
            loss = module.loss_step(module.forward_step(model, batch), batch)
            mean = loss.sum / batch.loss_mask.sum()
            penalty = torch.stack([one.values["penalty"] for one in penalized]).sum()
            other = penalized[1].values["other"] + loss.aux_losses["other"]
            ((mean + penalty + other) / accumulate).backward()
            logged.append([float(value.detach()) for value in (mean, penalty, other)])
        optimizer.step()
    assert all(0.05 < side < 20 for _, *sides in logged for side in sides), "a loss that would not be missed"
    return {"logged": logged, "final": whole(model)}


def check(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(found["logged"], expected["logged"], rtol=tolerance)
    for name, value in expected["final"].items():
        error = np.linalg.norm(found["final"][name] - value) / np.linalg.norm(value)
        assert error <= tolerance, f"{name} differs by {error:.2e}"


ONE = {"micro_batch_size": 1}
PP = {**ONE, "pipeline_parallel": 2}
FULL, GROUPS = RecomputeOptions(granularity="full"), RecomputeOptions(granularity="full", num_layers=2)
SELECTIVE = RecomputeOptions(granularity="selective", modules=("attention", "mlp_norm"))
RUNS: dict[str, tuple[int, dict[str, Any], int]] = {
    "auto": (1, {}, 1),
    "accumulate": (1, {"micro_batch_size": 2, "recompute": GROUPS}, 2),
    "dp": (2, {**ONE, "recompute": SELECTIVE}, 1),
    "tp": (2, {**ONE, "tensor_parallel": 2, "recompute": FULL}, 1),
    "sp": (2, {**ONE, "tensor_parallel": 2, "sequence_parallel": True}, 1),
    "pp": (2, PP, 1),
    "vpp": (2, {**PP, "virtual_pipeline": 2, "recompute": FULL}, 2),
    "zero bubble, dp": (4, {**PP, "pipeline": PipelineOptions(schedule="zero_bubble"), "recompute": SELECTIVE}, 1),
}


WHOLE = ("dp", "tp", "pp", "vpp")
"""Only whole runs have these: others have each axis, too."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in WHOLE)) for name in RUNS])
def test_equals_one_device(name: str) -> None:
    ranks, options, accumulate = RUNS[name]
    results = run(train, ranks, options, accumulate)
    check(results[0], expected(accumulate), 1e-9 if options else 1e-4)
    assert all(found["logged"] == results[0]["logged"] for found in results)


GRAPHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "iteration": (ONE, {"scope": "iteration"}),
    "layer": (ONE, {"scope": "layer"}),
    "transformer_engine": (ONE, {"scope": "layer", "backend": "transformer_engine"}),
}


def train_from_graphs(folder: str, name: str) -> dict[str, Any]:
    options, graphs = GRAPHS[name]
    with pytest.MonkeyPatch.context() as patch:
        if name == "transformer_engine":
            pretend_cuda(patch)
            fakes = Fakes(Path(folder), patch)
            fakes.add("transformer_engine", "2.12.0")
            fakes.add("transformer_engine.pytorch", make_graphed_callables=make_graphed_callables)
        return train(options, 1, {**graphs, "warmup_steps": 2})


@pytest.mark.parametrize("name", GRAPHS)
def test_equals_one_device_from_graphs(tmp_path: Path, name: str) -> None:
    check(run(train_from_graphs, 1, str(tmp_path), name)[0], expected())
