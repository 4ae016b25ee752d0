"""MegatronStrategy divides experts over ranks: the same run as on one device, whatever number of micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megalight.errors import LayoutError
from megalight.models.gpt import GPT, GPTConfig
from megalight.parallel.plan import Plan
from megalight.parallel.recompute import Recompute
from megalight.strategies import MegatronStrategy, Pipeline
from megalight.types import TokenBatch
from tests.environment import trainer
from tests.parallel.expert.model import build, plan
from tests.strategies.test_layout_changes import Again, contents
from tests.strategies.training import (
    ADAM,
    BASE,
    CLIP,
    SEED,
    Losses,
    WithData,
    assert_same_gradients,
    assert_same_run,
    by_hand,
    fit,
    gathered,
)
from tests.strategies.training import Gradients as FirstGradients
from tests.workers import run


def build_model(config: GPTConfig) -> GPT:
    """Experts in the last of two layers."""
    return build(config, layers=(1,))


class WithExperts(WithData):
    """A GPT with experts; each second replica cuts its share into fewer micro-batches than the others."""

    def build_model(self) -> nn.Module:
        return build_model(self.config)

    def plan(self, model: nn.Module) -> Plan:
        assert isinstance(model, GPT)
        return plan(model)

    def split_batch(self, batch: TokenBatch, size: int) -> Sequence[TokenBatch]:
        uneven = self.trainer.strategy.mesh.rank("dp") % 2
        return batch.split(len(batch) if uneven else size)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep2": (2, {"expert_parallel": 2}),
    "ep2edp2": (4, {"expert_parallel": 2}),
    "ep4": (4, {"expert_parallel": 4}),
    "tp2ep2": (2, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}),
    "tp2dp2ep4": (4, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 4}),
    "pp2ep2": (4, {"pipeline_parallel": 2, "expert_parallel": 2}),
    "pp2ep2zb": (4, {"pipeline_parallel": 2, "expert_parallel": 2, "pipeline": Pipeline(schedule="zero_bubble")}),
    "ep2again": (2, {"expert_parallel": 2, "recompute": Recompute(granularity="full")}),
    "cp2ep4": (4, {"context_parallel": 2, "expert_parallel": 4}),
}


@functools.cache
def expected(steps: int = 3) -> dict[str, Any]:
    return by_hand(BASE, steps, build=build_model)


def _fit(layout: str, level: str) -> dict[str, Any]:
    gradients = FirstGradients()
    options = {"micro_batch_size": 1, "module_type": WithExperts, **LAYOUTS[layout][1]}
    found = fit(BASE, options={"level": level}, extra_callbacks=[gradients], **options)
    return {**found, "gradients": gradients.first}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_run_as_on_one_device(layout: str) -> None:
    for level in ("optim", "no_shard") if layout in ("ep2edp2",) else ("optim",):
        found = run(_fit, LAYOUTS[layout][0], layout, level)
        for rank in found:
            assert rank["losses"] == found[0]["losses"], "ranks report different losses"
        assert_same_run(found[0], expected())
        assert_same_gradients(found[0]["gradients"], expected()["gradients"])
    assert max(expected()["norms"]) > CLIP, "nothing was clipped"


AT, STEPS = 2, 4


def _part(
    layout: str, stop: int, resume: str | None, save: str, again: str | None
) -> tuple[list[float], dict[str, Any]]:
    strategy = MegatronStrategy(micro_batch_size=1, **LAYOUTS[layout][1])
    losses = Losses()
    module = WithExperts(BASE, optimizer=ADAM, seed=SEED)
    module.steps = STEPS
    runner = trainer(
        strategy,
        callbacks=[losses, *([] if again is None else [Again(again)])],
        max_steps=stop,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    runner.fit(module, ckpt_path=resume)
    if save:
        runner.save_checkpoint(save)
    return losses.losses, gathered(strategy, module)


@pytest.mark.parametrize(("before", "after"), [("ep2", "one"), ("one", "ep2edp2"), ("ep2edp2", "tp2dp2ep4")])
def test_checkpoints_go_from_one_layout_to_another(before: str, after: str, tmp_path: Path) -> None:
    saved, again = str(tmp_path / "saved.ckpt"), str(tmp_path / "again.ckpt")
    run(_part, LAYOUTS[before][0], before, AT, None, saved, None)
    losses, final = run(_part, LAYOUTS[after][0], after, STEPS, saved, "", again)[0]
    first, second = contents(saved), contents(again)
    assert {f"model.layers.1.mlp.experts.{e}.down.weight" for e in range(4)} < first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    whole = expected(STEPS)
    np.testing.assert_allclose(losses, whole["losses"][AT:], rtol=1e-9)
    for name, value in whole["final"].items():
        error = np.linalg.norm(final[name] - value) / max(float(np.linalg.norm(value)), 1e-3)
        assert error <= 1e-9, f"{name} differs by {error:.2e}"


def _refused(options: dict[str, Any], module_type: type[WithData]) -> None:
    module = module_type(BASE, optimizer=ADAM, seed=SEED)
    trainer(MegatronStrategy(**options), use_distributed_sampler=False).fit(module)


@pytest.mark.parametrize(
    ("options", "module_type", "message"),
    [
        ({"expert_parallel": 2}, WithData, r"ep=2 divides experts .* Expert\(\) for no module"),
        ({"expert_parallel": 3}, WithExperts, "world size 1 is not a multiple of etp x ep x pp = 3"),
    ],
)
def test_layouts_that_cannot_work(options: dict[str, Any], module_type: type[WithData], message: str) -> None:
    ranks = 2 if module_type is WithData else 1
    with pytest.raises((AssertionError, LayoutError), match=message):
        run(_refused, ranks, options, module_type)
