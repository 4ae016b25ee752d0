"""What the host does for a layer and around it: counted where time would waver."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest

from benchmarks import gpu_path, host
from megalight.imports import has
from tests.strategies.regression import strategy
from tests.strategies.training import ADAM, CONFIGS, SEED, WithData
from tests.support.environment import trainer
from tests.support.workers import run

CALLS = 410
"""Functions that Python calls in one layer's forward and backward on the CPU: 400 with torch 2.13 and Python 3.11, a
few more or less with others. There were 660 when requests to backends were dataclasses, autograd functions looked for
what ``torch.func`` leaves, and every module had a hook."""


def _tiny() -> tuple[dict[str, float], dict[str, float], list[int]]:
    hooks: list[int] = []
    time_layer_of = host.time_layer_of

    def look(how: Any, *rest: Any) -> dict[str, float]:
        hooks.append(sum(len(part._forward_pre_hooks) for chunk in how.chunks for part in chunk.modules()))
        return time_layer_of(how, *rest)

    host.time_layer_of = look
    try:
        step = replace(host.TINY, device="cpu", layers=1, steps=2, warmup=1)
        return *host.ours(step, calls=2), hooks
    finally:
        host.time_layer_of = time_layer_of


def test_a_layer_calls_few_functions() -> None:
    parts, layer, hooks = run(_tiny, 1)[0]
    assert 100 < layer["calls"] < CALLS
    assert hooks == [0]  # with any, torch calls a module by the long way
    assert min(layer["forward"], layer["backward"]) > 0
    assert 0 < parts["outside"] < parts["step"]
    assert {"forward", "backward", "clip", "finish_gradients"} < parts.keys()


LIMITS = {
    "dense bf16": (488, 64, 14),
    "dense FP8": (973, 110, 30),
    "MoE bf16": (846, 118, 27),
    "MoE FP8": (1380, 216, 85),
}
"""Functions of Python, operators of torch and launches of one layer's forward and backward on the way of a GPU.

Of the weight gradient, only ``torch.addmm`` is replaced: the functions that call it count.
"""


@pytest.mark.skipif(has("triton"), reason="its kernels would be launched")
@pytest.mark.parametrize("kind", LIMITS)
def test_a_layer_on_the_way_of_a_gpu_calls_few_functions(kind: str) -> None:
    totals = run(_totals, 1, kind)[0]
    assert totals["launches"] == LIMITS[kind][2]
    assert LIMITS[kind][0] // 2 < totals["functions"] < LIMITS[kind][0]
    assert totals["operators"] < LIMITS[kind][1]


def _totals(kind: str) -> dict[str, int]:
    return gpu_path.counted(kind).totals


@pytest.mark.parametrize("make", [host.plain, host.transformers])
def test_layers_to_compare_with_have_gradients(make: Any) -> None:
    forward = make(replace(host.TINY, device="cpu"))
    assert forward().requires_grad
    assert host.count_calls(forward) > 50


class Counting(pl.Callback):
    """What is logged after each step, and how often the way with all checks was taken."""

    reads_weights = False

    def __init__(self) -> None:
        self.seen: list[tuple[float, float, float]] = []
        self.calls: Counter[str] = Counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        found = trainer.callback_metrics
        report: Any = trainer.strategy.report  # type: ignore[attr-defined]
        self.seen.append((float(found["train_loss"]), float(report.loss), float(found["grad_norm"])))


class Overrides(WithData):
    """Has a ``log`` of its own."""

    calls: Counter[str]

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.calls[name] += 1
        super().log(name, *args, **kwargs)


def _logged(override: bool) -> tuple[list[tuple[float, float, float]], dict[str, int]]:
    watch, plain = Counting(), pl.LightningModule.log
    module = (Overrides if override else WithData)(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    runner = trainer(
        strategy(micro_batch_size=1), callbacks=[watch], max_steps=-1, max_epochs=2, gradient_clip_val=1.0,
        use_distributed_sampler=False, limit_val_batches=0,
    )  # fmt: skip

    def counted(self: pl.LightningModule, name: str, *args: Any, **kwargs: Any) -> None:
        watch.calls[name] += 1
        plain(self, name, *args, **kwargs)

    module.calls = Counter() if override else watch.calls
    if not override:
        pl.LightningModule.log = counted  # type: ignore[method-assign]
    try:
        runner.fit(module)
    finally:
        pl.LightningModule.log = plain  # type: ignore[method-assign]
    return watch.seen, dict(module.calls)


def test_what_is_logged_is_each_steps_own_value() -> None:
    seen, calls = run(_logged, 1, False)[0]
    losses = [loss for loss, _, _ in seen]
    assert losses == [report for _, report, _ in seen]
    assert len(seen) == 6
    assert len(set(losses)) == len({norm for _, _, norm in seen}) == 6
    assert calls == {"train_loss": 2, "grad_norm": 2}  # once an epoch: then what it checks is known


def test_a_modules_own_log_is_called_at_each_step() -> None:
    seen, calls = run(_logged, 1, True)[0]
    assert calls["train_loss"] == calls["grad_norm"] == len(seen)
