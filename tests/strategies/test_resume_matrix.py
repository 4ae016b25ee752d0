"""A run that stops three times and resumes each time is bit by bit the run that never stopped: layouts x formats."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalight.callbacks import EMA
from megalight.models.config import DropoutConfig
from megalight.nn.moe import MoEConfig
from megalight.parallel.context.options import ContextOptions
from megalight.parallel.source import shard_boxes
from megalight.strategies import Checkpoints, DataParallel, MegatronStrategy, Pipeline
from tests.environment import trainer
from tests.strategies.training import ADAM, CLIP, CONFIGS, SEED, Losses, WithData
from tests.workers import run

# dropout draws from the random streams of every rank, so those must be restored too
CONFIG = replace(CONFIGS["tied"], num_layers=4, dropout=DropoutConfig(hidden=0.1))
EXPERTS = replace(CONFIG, num_layers=2, moe=MoEConfig(num_experts=4, ffn_hidden_size=12, pattern=(False, True)))
STOPS = (2, 3, 5, 6)
FORMATS = ("fully_reshardable", "dp_reshardable", "fsdp_dtensor")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp2 no_shard": (2, {"data_parallel": DataParallel(level="no_shard")}),
    "full2": (2, {"data_parallel": DataParallel(level="optim_grads_params")}),
    "full hsdp": (4, {"data_parallel": DataParallel(level="optim_grads_params", replicate=2)}),
    "full tp2dp2": (4, {"tensor_parallel": 2, "data_parallel": DataParallel(level="optim_grads_params")}),
    "experts full ep2": (2, {"expert_parallel": 2, "data_parallel": DataParallel(level="optim_grads_params")}),
    "tp2": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "pp2vpp2": (2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "pp2zb": (2, {"pipeline_parallel": 2, "pipeline": Pipeline(schedule="zero_bubble")}),
    "cp2": (2, {"context_parallel": 2, "context": ContextOptions("ring")}),
    "tp2dp2": (4, {"tensor_parallel": 2}),
    "tp2pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
}


def _fit(layout: str, form: str, stop: int, resume: str | None, save: str) -> tuple[list[float], str]:
    """Train from a checkpoint until ``stop``; return the losses, and a digest of this rank's whole optimizer state."""
    strategy = MegatronStrategy(micro_batch_size=1, checkpoints=Checkpoints(format=form), **LAYOUTS[layout][1])
    config = EXPERTS if layout.startswith("experts") else CONFIG
    losses, module = Losses(), WithData(config, optimizer=ADAM, seed=SEED)
    losses.on_train_start = lambda *_: None  # type: ignore[method-assign]
    module.steps = STOPS[-1]
    runner = trainer(
        strategy,
        callbacks=[EMA(0.5), losses],
        max_steps=stop,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        limit_val_batches=0,
        precision="bf16-true",
    )
    runner.fit(module, ckpt_path=resume)
    if save:
        runner.save_checkpoint(save)
    digest = hashlib.sha256()
    assert strategy.engine is not None
    for state in strategy.run.contents(optimizer=True).states:
        digest.update(state.prefix.encode())
        for tensor, shard in zip(state.tensors, state.shards, strict=True):
            for _, _, part in shard_boxes(tensor, shard):  # without padding, whose values nobody reads
                digest.update(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return losses.losses, digest.hexdigest()


def _all(layout: str, forms: tuple[str, ...], folder: str) -> dict[str, list[tuple[list[float], str]]]:
    """The run that never stops, and for each format what each of the following runs did."""
    found = {"whole": [_fit(layout, forms[0], STOPS[-1], None, "")]}
    for form in forms:
        paths = [f"{folder}/{form}-{stop}.ckpt" for stop in STOPS]
        begins = [None, *paths[:-1]]
        found[form] = [_fit(layout, form, *each) for each in zip(STOPS, begins, paths, strict=True)]
    return found


def check(layout: str, forms: tuple[str, ...], folder: Path) -> None:
    for ranks in run(_all, LAYOUTS[layout][0], layout, forms, str(folder), timeout=600):
        ((losses, state),) = ranks["whole"]
        for form in forms:
            runs = ranks[form]
            assert [loss for each, _ in runs for loss in each] == losses, (layout, form)
            assert [len(each) for each, _ in runs] == [2, 1, 2, 1]
            assert runs[-1][1] == state, (layout, form)


@pytest.mark.timeout(900)
@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_resumes_are_bitwise(layout: str, tmp_path: Path) -> None:
    """14 layouts x 3 formats x 3 resumes: 126 configurations."""
    check(layout, FORMATS, tmp_path)


def test_resumes_under_full_sharding_are_bitwise(tmp_path: Path) -> None:
    check("full2", ("fsdp_dtensor",), tmp_path)
