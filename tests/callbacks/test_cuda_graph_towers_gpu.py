"""Real CUDA graphs of layers of vision towers and of whole steps: those of eager runs, on one GPU and over NCCL."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest

from megalight.callbacks import CUDAGraph
from megalight.strategies import Layout, MegatronStrategy, MegatronTowersStrategy
from tests.models.test_vlm_strategy import CONFIGS, WithData
from tests.strategies.training import ADAM, CLIP, SEED
from tests.support.environment import trainer
from tests.support.nccl import runs_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

NEVER = 1000
SP = {"tensor_parallel": 2, "sequence_parallel": True}
CP = {"context_parallel": 2}
ROWS: list[tuple[int, str, str, str, Any, dict[str, Any], int]] = [
    # GPUs, scope, model, images of rows, strategy, options; replayed forwards of a step on rank 0, or the step.
    (1, "layer", "llava", "same", MegatronTowersStrategy, {"tower": Layout()}, 2 * 4 + 2 * 4),
    (1, "attention", "qwen3", "same_huge", MegatronTowersStrategy, {"tower": Layout()}, 3 * 4 + 2 * 4),
    (1, "layer", "intern", "same", MegatronStrategy, {}, 2 * 4 + 2 * 4),
    (2, "layer", "llava", "same", MegatronTowersStrategy, {"tower": Layout(), **SP}, 2 * 4 + 2 * 4),
    (2, "layer", "qwen3", "same_huge", MegatronTowersStrategy, {"tower": Layout(**CP), **SP}, 3 * 4 + 2 * 4),
    (2, "layer", "intern", "same", MegatronTowersStrategy, {"placement": "disjoint", "tower": Layout()}, 2 * 4),
    (1, "iteration", "llava", "same", MegatronStrategy, {}, 1),
    (1, "iteration", "llava", "same", MegatronTowersStrategy, {"tower": Layout()}, 1),
    (1, "iteration", "qwen", "same_huge", MegatronStrategy, {}, 1),
    (2, "iteration", "llava", "same", MegatronTowersStrategy, {"tower": Layout(), **SP}, 1),
    (2, "iteration", "llava", "same", MegatronTowersStrategy, {"tower": Layout(**SP)}, 1),
]


class Kept(pl.Callback):
    """Loss and gradient norm of every step."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        self.rows.append([float(trainer.strategy.report.loss), float(trainer.callback_metrics["grad_norm"])])


def losses(scope: Any, name: str, counts: str, kind: Any, options: dict[str, Any], warmup: int) -> tuple[Any, int]:
    """Losses and norms of four steps, and how many forwards were replayed."""
    callback, kept = CUDAGraph(scope, warmup_steps=warmup, on_refusal="error"), Kept()
    module = WithData(CONFIGS[name], optimizer=ADAM, seed=SEED)
    module.case = (name, counts)
    trainer(
        kind(micro_batch_size=1, **options),
        accelerator="cuda",
        precision="32-true",
        callbacks=[kept, callback],
        max_steps=4,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        limit_val_batches=0,
    ).fit(module)
    return kept.rows, callback.replays


def compare(*row: Any) -> tuple[Any, Any, int]:
    expected, _ = losses(*row, NEVER)
    found, replays = losses(*row, 2)
    return expected, found, replays


def jobs(world: int) -> list[tuple[Any, tuple[Any, ...]]]:
    return [(compare, row[1:-1]) for row in ROWS if row[0] == world]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_replays_train_as_eager_steps_do(row: tuple[Any, ...]) -> None:
    world, *arguments, replays = row
    expected, found, replayed = runs_of(jobs, world).outcome(tuple(arguments))
    assert replayed == 2 * replays
    np.testing.assert_allclose(found, expected, rtol=2e-5)
