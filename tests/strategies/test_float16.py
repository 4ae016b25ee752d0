"""``16-mixed``: the loss is scaled, and a step whose gradients overflow is skipped on all ranks.

Most tests let another dtype stand in for float16. Scaling by powers of two is then exact, so results must be those of a
run without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.optim import Adam
from megalight.plugins.precision import LossScale, MegatronPrecision
from megalight.strategies import MegatronStrategy
from tests.strategies.regression import Plain, batches, dealt, strategy, weights
from tests.strategies.test_drop_in import close
from tests.strategies.test_ordinary import Newton
from tests.strategies.toy import ToyModule
from tests.support.environment import trainer
from tests.support.workers import run


def plugin(dtype: torch.dtype | None = torch.float64, scale: float = 2.0**10) -> MegatronPrecision:
    precision = MegatronPrecision("16-mixed")
    precision.dtype = dtype or precision.dtype
    assert precision.loss_scale is not None
    precision.loss_scale.scale = scale
    return precision


def runner_of(how: MegatronStrategy, **options: Any) -> pl.Trainer:
    defaults = {"precision": None, "max_steps": -1, "max_epochs": 1, "limit_val_batches": 0}
    return trainer(how, **{**defaults, **options})


class Fused(ToyModule):
    """The optimizer scales gradients in its own kernel."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Adam(self.parameters(), lr=1e-2)


def _toy(scaled: bool, layout: dict[str, Any]) -> tuple[list[list[float]], float]:
    module = Fused()
    precision = plugin() if scaled else MegatronPrecision("64-true")
    how = MegatronStrategy(micro_batch_size=1, precision_plugin=precision, **layout)
    runner = runner_of(how, gradient_clip_val=0.5, use_distributed_sampler=False)
    runner.fit(module)
    return weights(module), float(runner.callback_metrics["train_loss"])


@pytest.mark.parametrize(("ranks", "layout"), [(1, {}), (2, {}), (2, {"pipeline_parallel": 2})])
def test_scaling_changes_nothing_under_any_layout(ranks: int, layout: dict[str, Any]) -> None:
    for (found, loss), (expected, usual) in zip(
        run(_toy, ranks, True, layout), run(_toy, ranks, False, layout), strict=True
    ):
        close(found, expected)
        assert loss == pytest.approx(usual, rel=1e-12)


class Overflows(Plain):
    """The loss of one rank is infinite in its second batch."""

    def __init__(self, rank: int) -> None:
        super().__init__("AdamW")
        self.rank = rank

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if batch_idx == 1 and self.global_rank == self.rank else loss


def _overflowing(rank: int, level: str) -> tuple[list[list[float]], float, int]:
    module = Overflows(rank).double()
    how = strategy(level)
    how.precision_plugin = precision = plugin()
    runner = runner_of(how, gradient_clip_val=100.0)
    runner.fit(module, batches(16, 2))
    assert precision.loss_scale is not None
    return weights(module), precision.loss_scale.scale, runner.global_step


@pytest.mark.parametrize("level", ["optim", "no_shard"])
def test_all_ranks_skip_a_step_in_which_one_overflows(level: str) -> None:
    module = Plain("AdamW").double()
    optimizer = module.configure_optimizers()
    for number, step in enumerate(dealt(16, 2, 2)):
        if number != 1:
            optimizer.zero_grad()
            torch.stack([module.training_step(batch, 0) for batch in step]).mean().backward()
            optimizer.step()
    for found, scale, steps in run(_overflowing, 2, 1, level):
        close(found, weights(module))
        assert (scale, steps) == (2.0**9, 4)


class Half(Plain):
    def __init__(self) -> None:
        super().__init__("AdamW")
        self.seen: set[torch.dtype] = set()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = (value.float() for value in batch)
        out = self(x)
        self.seen.add(out.dtype)
        return torch.nn.functional.mse_loss(out.float(), y)


def _half(size: int) -> tuple[list[list[float]], list[str], float]:
    module, how = Half(), strategy()
    how.precision_plugin = precision = plugin(None, 2.0**16)
    runner_of(how).fit(module, batches(16, size))
    assert precision.loss_scale is not None
    return weights(module), [str(dtype) for dtype in module.seen], precision.loss_scale.scale


def _by_hand() -> list[list[float]]:
    """The same with autocast and a fixed scale, on the batches of two replicas."""
    module = Half()
    optimizer = module.configure_optimizers()
    for step in dealt(16, 2, 2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            losses = [module.training_step(batch, 0) for batch in step]
        (torch.stack(losses).mean() * 2.0**16).backward()
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2.0**16
        optimizer.step()
    return weights(module)


def test_float16_on_replicas_is_float16_on_one_device() -> None:
    for found, kinds, scale in run(_half, 2, 2):
        close(found, _by_hand(), 1e-3)
        assert (kinds, scale) == (["torch.float16"], 2.0**16)


def _resumed(path: str) -> tuple[float, int]:
    how = strategy()
    how.precision_plugin = first = plugin(scale=2.0**5)
    runner = runner_of(how)
    runner.fit(Plain().double(), batches(8, 4))
    runner.save_checkpoint(path)
    assert first.loss_scale is not None
    how = strategy()
    how.precision_plugin = second = plugin()
    runner_of(how, max_epochs=2).fit(Plain().double(), batches(8, 4), ckpt_path=path)
    assert second.loss_scale is not None
    return second.loss_scale.scale, second.loss_scale.finite_steps


def test_the_scale_resumes(tmp_path: Path) -> None:
    assert run(_resumed, 1, str(tmp_path / "scaled.ckpt")) == [(2.0**5, 4)]


def test_the_scale_grows_and_shrinks() -> None:
    scale = LossScale(scale=8.0, growth_interval=2)
    seen = []
    for finite in (True, True, True, False, True, True):
        scale.update(finite)
        seen.append(scale.scale)
    assert seen == [8, 16, 16, 8, 8, 16]


def _newton() -> str:
    how = strategy()
    how.precision_plugin = plugin()
    with pytest.raises(ConfigurationError, match="not run with loss scaling") as caught:
        runner_of(how).fit(Newton().double(), batches(4, 4))
    return type(caught.value).__name__


def test_optimizers_of_whole_parameters_are_refused() -> None:
    assert run(_newton, 1) == ["ConfigurationError"]
