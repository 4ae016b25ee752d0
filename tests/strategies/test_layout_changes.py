"""A checkpoint of any layout goes on under any other: weights, optimizer state and the losses that follow."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megalight import checkpoint
from megalight.nn.moe import MoEConfig
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.data_parallel import AdvancedDataParallelOptions
from megalight.parallel.expert import ExpertOptions
from megalight.strategies import DataParallelOptions, MegatronStrategy, PipelineOptions
from tests.strategies.training import ADAM, CLIP, CONFIGS, SEED, Losses, WithData, gathered
from tests.support.environment import trainer
from tests.support.workers import run

EXPERTS = replace(CONFIGS["gqa"], num_layers=4, moe=MoEConfig(num_experts=4, ffn_hidden_size=12, pattern=(False, True)))
CONFIG = replace(CONFIGS["tied"], num_layers=4)  # tied across the ends; 101 tokens: two ranks hold a padded vocabulary
AT, STEPS = 1, 2

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "pp2vpp2": (2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "pp2zb": (2, {"pipeline_parallel": 2, "pipeline": PipelineOptions(schedule="zero_bubble")}),
    "cp2": (2, {"context_parallel": 2, "context": ContextOptions("ring")}),
    "tp2pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "dp2": (2, {}),
    "uneven": (2, {"pipeline_parallel": 2, "pipeline_layout": "E|t*3|t|L"}),
    "ends": (4, {"pipeline_parallel": 4, "pipeline_layout": "E|t*4||L"}),  # stages that lack a parameter group, or all
    "pp2dp2": (4, {"pipeline_parallel": 2, "data_parallel": DataParallelOptions(level="no_shard")}),
    "full2": (2, {"data_parallel": DataParallelOptions(level="optim_grads_params")}),
    "hybrid4": (4, {"data_parallel": DataParallelOptions(level="optim_grads_params", replicate=2)}),
    "both4": (
        4,
        {
            "data_parallel": DataParallelOptions(
                level="optim_grads_params", replicate=2, advanced=AdvancedDataParallelOptions(replicate_optimizer=False)
            )
        },
    ),
    "pp2full2": (4, {"pipeline_parallel": 2, "data_parallel": DataParallelOptions(level="optim_grads_params")}),
    "full4": (4, {"tensor_parallel": 2, "data_parallel": DataParallelOptions(level="optim_grads_params")}),
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "experts": (1, {}),
    "experts dp2": (2, {"data_parallel": DataParallelOptions(level="no_shard")}),
    "experts ep2": (2, {"expert_parallel": 2}),
    "experts ep2 gathered": (2, {"expert_parallel": 2, "expert": ExpertOptions("all_gather")}),
    "experts ep4": (4, {"expert_parallel": 4}),
    "experts ep2edp2": (4, {"expert_parallel": 2}),
    "experts etp2": (2, {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2}),
    "experts tp2ep2": (2, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}),
    "experts ep2etp2": (4, {"expert_parallel": 2, "expert_tensor_parallel": 2}),
    "experts tp2dp2ep4": (4, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 4}),
    "experts pp2": (2, {"pipeline_parallel": 2}),
    "experts pp2vpp2": (2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "experts pp2ep2": (4, {"pipeline_parallel": 2, "expert_parallel": 2}),
    "experts cp2ep2": (2, {"context_parallel": 2, "expert_parallel": 2}),
}
"""The same with stacks of experts. In checkpoints each expert has a name of its own."""
COVER = {
    "one": ["pp2vpp2", "cp2"],
    "tp2": ["uneven"],
    "pp2": ["ends"],
    "pp2vpp2": ["full2"],
    "pp2zb": ["dp2"],
    "cp2": ["pp2zb"],
    "dp2": ["tp2"],
    "uneven": ["one"],
    "ends": ["pp2"],
    "full2": ["both4"],
    "both4": ["hybrid4"],
    "hybrid4": ["full2"],
}
"""What each layout loads. Each that divides in one way is saved and loaded, and kinds of layouts meet."""


def every() -> dict[str, tuple[int, dict[str, Any]]]:
    return {**LAYOUTS, **EXPERT_LAYOUTS}


class Again(pl.Callback):
    """Saves what was loaded before anything is done with it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def _fit(layout: str, stop: int, resume: str | None, save: str, then: str | None) -> tuple[list[float], dict[str, Any]]:
    strategy = MegatronStrategy(micro_batch_size=1, **every()[layout][1])
    losses = Losses()
    module = WithData(EXPERTS if layout in EXPERT_LAYOUTS else CONFIG, optimizer=ADAM, seed=SEED)
    module.steps = STEPS
    runner = trainer(
        strategy,
        callbacks=[losses, *([] if then is None else [Again(then)])],
        max_steps=stop,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    runner.fit(module, ckpt_path=resume)
    if stop == AT:
        runner.save_checkpoint(save)
    return losses.losses, gathered(strategy, module)


def _load_each(layout: str, paths: list[str], folder: str) -> list[tuple[list[float], dict[str, Any]]]:
    return [_fit(layout, STEPS, path, "", f"{folder}/{n}.ckpt") for n, path in enumerate(paths)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The checkpoint of a layout, half-way."""
    folder = tmp_path_factory.mktemp("saved")

    @functools.cache
    def save(layout: str) -> str:
        path = str(folder / f"{layout}.ckpt")
        run(_fit, every()[layout][0], layout, AT, None, path, None)
        return path

    yield save
    shutil.rmtree(folder)


@functools.cache
def undisturbed(layout: str) -> tuple[list[float], dict[str, Any]]:
    found: tuple[list[float], dict[str, Any]] = run(_fit, 1, layout, STEPS, None, "", None)[0]
    return found


def contents(path: str) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    opened = checkpoint.open(path)
    files = {
        name: load_file(opened.path / name) for name in {c.file for t in opened.tensors.values() for c in t.chunks}
    }
    whole = {}
    for name, info in opened.tensors.items():
        whole[name] = torch.full(info.shape, torch.nan, dtype=getattr(torch, info.dtype))
        for chunk in info.chunks:
            box = tuple(slice(start, start + size) for start, size in zip(chunk.offset, chunk.size, strict=True))
            whole[name][box] = files[chunk.file][chunk.key]
    return whole


def check(layout: str, sources: list[str], saved: Any, folder: Path) -> None:
    losses, weights = undisturbed("experts" if layout in EXPERT_LAYOUTS else "one")
    paths = [saved(source) for source in sources]
    found = run(_load_each, every()[layout][0], layout, paths, str(folder), timeout=300)
    for number, (source, path) in enumerate(zip(sources, paths, strict=True)):
        before, after = contents(path), contents(f"{folder}/{number}.ckpt")
        assert before.keys() == after.keys()
        assert {name.split(".")[1] for name in before if name.startswith("optimizer.")} == {"exp_avg", "exp_avg_sq"}
        for name, value in before.items():
            assert torch.equal(after[name], value), f"{name} of {source} changed under {layout}"
        for rank in found:
            assert rank[number][0] == found[0][number][0], "ranks report different losses"
        np.testing.assert_allclose(found[0][number][0], losses[AT:], rtol=1e-9, err_msg=source)
        for name, value in weights.items():
            error = np.linalg.norm(found[0][number][1][name] - value) / max(float(np.linalg.norm(value)), 1e-3)
            assert error <= 1e-9, f"{name} from {source} under {layout} differs by {error:.2e}"


def test_every_way_to_divide_is_saved_and_loaded() -> None:
    """Layouts that divide in two ways are in the full matrix below."""
    twice = {"tp2pp2", "pp2dp2", "pp2full2", "full4"}
    assert set(COVER) == {source for sources in COVER.values() for source in sources} == LAYOUTS.keys() - twice


PLAIN = ("one", "tp2", "pp2vpp2", "cp2", "dp2")
"""One of each axis. The others divide along the same ones."""


@pytest.mark.parametrize(
    "layout", [layout if layout in PLAIN else pytest.param(layout, marks=pytest.mark.full) for layout in COVER]
)
def test_a_layout_goes_on_from_another(layout: str, saved: Any, tmp_path: Path) -> None:
    check(layout, COVER[layout], saved, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_goes_on_from_every_layout(layout: str, saved: Any, tmp_path: Path) -> None:
    check(layout, list(LAYOUTS), saved, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_experts_go_on_from_every_layout(layout: str, saved: Any, tmp_path: Path) -> None:
    """14 x 14 pairs, like the test above."""
    check(layout, list(EXPERT_LAYOUTS), saved, tmp_path)


@pytest.mark.parametrize("layout", ["pp2vpp2", pytest.param("pp2zb", marks=pytest.mark.full)])
def test_the_same_pipeline_resumes_bit_for_bit(layout: str, saved: Any, tmp_path: Path) -> None:
    ((losses, final), _) = run(_fit, 2, layout, STEPS, None, "", None)
    ((again,), _) = run(_load_each, 2, layout, [saved(layout)], str(tmp_path))
    assert again[0] == losses[AT:]
    for name, value in final.items():
        assert np.array_equal(again[1][name], value), name
