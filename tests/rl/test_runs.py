"""GRPO beside other parts of a run: precisions, adapters, recompute, interleaved stages, resumes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from megalight.callbacks import Adapters
from megalight.models.gpt import GPT
from megalight.models.stored import held_model, save_model
from megalight.nn.init import initialize
from megalight.parallel.recompute import RecomputeOptions
from megalight.rl.loss import PolicyLoss
from megalight.strategies import MegatronStrategy
from tests.rl.helpers import CONFIG, ROLLOUTS, Policy
from tests.strategies.training import SEED
from tests.support.environment import trainer
from tests.support.workers import run


def figures_of(
    strategy: Mapping[str, Any], options: Mapping[str, Any], how: Mapping[str, Any]
) -> list[dict[str, float]]:
    figures: list[dict[str, float]] = []

    class Kept(Policy):
        def on_train_batch_end(self, *args: Any) -> None:
            figures.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    given: dict[str, Any] = {"max_steps": 2, "limit_val_batches": 0, "use_distributed_sampler": False, **how}
    trainer(MegatronStrategy(micro_batch_size=1, **strategy), **given).fit(Kept(**options))
    return figures


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", pytest.param("bf16-mixed", marks=pytest.mark.full)])
def test_rounding_alone_lies_between_drawing_and_training(precision: Any) -> None:
    for figures in run(figures_of, 2, {"tensor_parallel": 2}, {}, {"precision": precision}):
        for step in figures:
            assert all(math.isfinite(value) for value in step.values())
            assert 0 <= step["train_drift"] < (1e-10 if precision == "32-true" else 1e-3)


def test_nothing_lies_between_them_in_batch_invariant_mode() -> None:
    def drifts(on: bool, **strategy: Any) -> list[float]:
        options = {"rollouts": replace(ROLLOUTS, batch_invariant=on)}
        return [step["train_drift"] for step in run(figures_of, 1, strategy, options, {"precision": "bf16-true"})[0]]

    assert drifts(True) == drifts(True, recompute=RecomputeOptions(granularity="full")) == [0, 0]
    assert all(drift > 0 for drift in drifts(False))


@pytest.mark.full
def test_recompute_and_interleaved_stages_change_nothing() -> None:
    plain = run(figures_of, 1, {}, {}, {})[0]
    ways = [{"recompute": RecomputeOptions(granularity="full")}, {"pipeline_parallel": 2, "pipeline_layout": "E|t|t|L"}]
    for way in ways:
        for step, expected in zip(run(figures_of, 2, way, {}, {})[1], plain, strict=True):
            assert step == pytest.approx({**step, **{k: expected[k] for k in ("train_loss", "train_reward")}}, rel=1e-9)


def test_adapters_learn_beside_the_model_they_change(tmp_path: Path) -> None:
    model = GPT(CONFIG).double()
    initialize(model, SEED, "model.")
    save_model(held_model("gpt", CONFIG, model), tmp_path / "base")
    options = {"config": None, "weights": tmp_path / "base", "loss": PolicyLoss(kl=0.1)}
    first, second = run(adapted, 1, options)[0]
    assert first["train_kl"] == pytest.approx(
        0, abs=1e-12
    )  # adapters begin with no effect, and weights is the reference
    assert second["train_kl"] > 1e-8


def adapted(options: Mapping[str, Any]) -> list[dict[str, float]]:
    return figures_of({}, options, {"callbacks": [Adapters(rank=4)]})


def stepped(root: str, steps: int, resume: bool, strategy: Mapping[str, Any]) -> tuple[list[Any], float]:
    module = Policy(4)
    keep = ModelCheckpoint(root, "two", every_n_train_steps=2, save_top_k=-1)
    how = trainer(
        MegatronStrategy(**strategy),
        root,
        max_steps=steps,
        limit_val_batches=0,
        use_distributed_sampler=False,
        enable_checkpointing=True,
        callbacks=[keep],
    )
    how.fit(module, ckpt_path=str(Path(root) / "two.ckpt") if resume else None)
    return module.seen, float(how.callback_metrics["train_loss"])


def test_a_resumed_run_draws_what_an_uninterrupted_one_draws(tmp_path: Path) -> None:
    whole, loss = run(stepped, 1, str(tmp_path / "whole"), 4, False, {})[0]
    first, _ = run(stepped, 1, str(tmp_path / "half"), 2, False, {})[0]
    second, after = run(stepped, 2, str(tmp_path / "half"), 4, True, {"tensor_parallel": 2})[0]
    assert first == whole[:2]
    assert second[-1] == whole[-1]
    assert after == pytest.approx(loss, rel=1e-9)
