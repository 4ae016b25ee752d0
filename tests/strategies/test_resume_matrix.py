"""A run that stops three times and resumes each time is bit by bit the run that never stopped: layouts x formats."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from megalight.callbacks import EMA
from megalight.checkpoint.async_save.saves import Kind
from megalight.data.gpt.module import GPTDataModule
from megalight.data.indexed import IndexedWriter
from megalight.models.config import DropoutConfig
from megalight.models.gpt import GPTModule
from megalight.nn.moe import MoEConfig
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.precision import LowPrecisionOptions
from megalight.parallel.source import shard_boxes
from megalight.plugins.precision import MegatronLowPrecision
from megalight.strategies import (
    CheckpointOptions,
    DataParallelOptions,
    Layout,
    MegatronStrategy,
    MegatronTowersStrategy,
    PipelineOptions,
)
from tests.models.test_vlm_strategy import CONFIGS as VLMS
from tests.models.test_vlm_strategy import WithData as VLMWithData
from tests.strategies.training import ADAM, CLIP, CONFIGS, SEED, Losses, WithData
from tests.support.environment import trainer
from tests.support.workers import run

# dropout draws from the random streams of every rank, so those must be restored too
CONFIG = replace(CONFIGS["tied"], num_layers=4, dropout=DropoutConfig(hidden=0.1))
EXPERTS = replace(CONFIG, num_layers=2, moe=MoEConfig(num_experts=4, ffn_hidden_size=12, pattern=(False, True)))
WIDE = replace(CONFIG, hidden_size=64, ffn_hidden_size=64)
"""As products in 8 bits need it."""
STOPS = (2, 3, 5, 6)
FORMATS = ("fully_reshardable", "dp_reshardable", "fsdp_dtensor")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp2 no_shard": (2, {"data_parallel": DataParallelOptions(level="no_shard")}),
    "full2": (2, {"data_parallel": DataParallelOptions(level="optim_grads_params")}),
    "full hsdp": (4, {"data_parallel": DataParallelOptions(level="optim_grads_params", replicate=2)}),
    "full tp2dp2": (4, {"tensor_parallel": 2, "data_parallel": DataParallelOptions(level="optim_grads_params")}),
    "experts full ep2": (2, {"expert_parallel": 2, "data_parallel": DataParallelOptions(level="optim_grads_params")}),
    "tp2": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "pp2vpp2": (2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "pp2zb": (2, {"pipeline_parallel": 2, "pipeline": PipelineOptions(schedule="zero_bubble")}),
    "cp2": (2, {"context_parallel": 2, "context": ContextOptions("ring")}),
    "tp2dp2": (4, {"tensor_parallel": 2}),
    "tp2pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
}
COLOCATED = {"kind": MegatronTowersStrategy, "tower": Layout()}
TOWERS: dict[str, tuple[int, dict[str, Any]]] = {
    "disjoint, tower cp2": (
        3,
        {"kind": MegatronTowersStrategy, "placement": "disjoint", "tower": Layout(ranks=2, context_parallel=2)},
    ),
    "colocated, tower cp2": (
        2,
        {**COLOCATED, "tower": Layout(context_parallel=2), "tensor_parallel": 2, "sequence_parallel": True},
    ),
    "colocated, full pp2": (
        4,
        {**COLOCATED, "pipeline_parallel": 2, "data_parallel": DataParallelOptions(level="optim_grads_params")},
    ),
}
"""Of models with a vision tower. Checkpoints of two layouts have one format."""


@dataclass(frozen=True)
class How:
    """What may differ between the runs of a chain, or makes their numbers special.

    Attributes:
        saves: ``async_save`` of the run; None: saves while training stands still.
        readers: processes that read the data of a rank; None: the module brings its own data.
        delayed: whether products are in 8 bits, with scales from the magnitudes of past steps.
    """

    saves: Kind | None = None
    readers: int | None = None
    delayed: bool = False


class SaveAt(pl.Callback):
    """Saves in training, at the end of a step."""

    reads_weights = False
    """Else weights would stay in bf16, whose buckets sum the norm of gradients in another order than quantized ones."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def _data(how: How, folder: str) -> GPTDataModule | None:
    if how.readers is None:
        return None
    # Ranks of the pool are daemons, which may start no processes of their own.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    return GPTDataModule(
        data=f"{folder}/tokens",
        split="1",
        global_batch_size=4,
        sequence_length=12,
        vocab_size=CONFIG.vocab_size,
        num_workers=how.readers,
        cache_dir=f"{folder}/cache",
    )


def _fit(
    layout: str, form: str, stop: int, resume: str | None, save: str, how: How, folder: str
) -> tuple[list[float], str]:
    """Train from a checkpoint until ``stop``; return the losses, and a digest of this rank's whole optimizer state."""
    plugin = None
    if how.delayed:
        plugin = MegatronLowPrecision(LowPrecisionOptions("delayed", history=3, emulate=True), "bf16-true")
    options = dict((LAYOUTS | TOWERS)[layout][1])
    strategy = options.pop("kind", MegatronStrategy)(
        micro_batch_size=1,
        checkpoints=CheckpointOptions(format=form, async_save=how.saves),
        precision_plugin=plugin,
        **options,
    )
    config = EXPERTS if layout.startswith("experts") else WIDE if how.delayed else CONFIG
    losses, data = Losses(), _data(how, folder)
    losses.on_train_start = lambda *_: None  # type: ignore[method-assign]
    module: Any
    if layout in TOWERS:
        module = VLMWithData(VLMS["dropping"], optimizer=ADAM, seed=SEED)
        module.case = ("dropping", "six")
    else:
        module = (WithData if data is None else GPTModule)(config, optimizer=ADAM, seed=SEED)
    if isinstance(module, WithData):
        module.steps = STOPS[-1]
    saves = [SaveAt(stop, save)] if save and how.saves else []
    runner = trainer(
        strategy,
        callbacks=[EMA(0.5), losses, *saves],
        max_steps=stop,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        limit_val_batches=0,
        precision=None if how.delayed else "bf16-true",
    )
    runner.fit(module, data, ckpt_path=resume)
    if save and not saves:
        runner.save_checkpoint(save)
    digest = hashlib.sha256()
    assert strategy.engine is not None
    for state in strategy.run.contents(optimizer=True).states:
        digest.update(state.prefix.encode())
        for tensor, shard in zip(state.tensors, state.shards, strict=True):
            for _, _, part in shard_boxes(tensor, shard):  # without padding, whose values nobody reads
                digest.update(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    if how.delayed:
        past = strategy.run.rank_state()["magnitudes"]["past"]
        assert past.numel()
        assert past.count_nonzero() > 0
        digest.update(past.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return losses.losses, digest.hexdigest()


def _all(layout: str, forms: tuple[str, ...], folder: str, hows: Sequence[How]) -> dict[str, Any]:
    """The run that never stops, and for each format what each of the following runs did."""
    # The first way, without saves beside it.
    whole, stops = replace(hows[0], saves=None), STOPS[: len(hows)]
    found: dict[str, Any] = {"whole": [_fit(layout, forms[0], stops[-1], None, "", whole, folder)]}
    for form in forms:
        paths = [f"{folder}/{form}-{stop}.ckpt" for stop in stops]
        begins = [None, *paths[:-1]]
        runs = zip(stops, begins, [*paths[:-1], ""], hows, strict=True)
        found[form] = [_fit(layout, form, stop, begin, path, how, folder) for stop, begin, path, how in runs]
    return found


def check(layout: str, forms: tuple[str, ...], folder: Path, hows: Sequence[How] = (How(),) * len(STOPS)) -> None:
    if hows[0].readers is not None:
        draw = np.random.default_rng(3)
        with IndexedWriter(folder / "tokens", "uint16") as writer:
            writer.add_documents(draw.integers(0, CONFIG.vocab_size, 700), [70] * 10)
    for ranks in run(_all, (LAYOUTS | TOWERS)[layout][0], layout, forms, str(folder), hows, timeout=600):
        ((losses, state),) = ranks["whole"]
        for form in forms:
            runs = ranks[form]
            assert [loss for each, _ in runs for loss in each] == losses, (layout, form)
            assert [len(each) for each, _ in runs] == [2, 1, 2, 1][: len(hows)]
            assert runs[-1][1] == state, (layout, form)


@pytest.mark.timeout(900)
@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_resumes_are_bitwise(layout: str, tmp_path: Path) -> None:
    """14 layouts x 3 formats x 3 resumes: 126 configurations."""
    check(layout, FORMATS, tmp_path)


@pytest.mark.timeout(900)
@pytest.mark.full
@pytest.mark.parametrize("layout", TOWERS)
def test_three_resumes_with_a_tower_are_bitwise(layout: str, tmp_path: Path) -> None:
    check(layout, FORMATS[:1], tmp_path)


@pytest.mark.full  # the test below does it with more that changes
def test_resumes_under_full_sharding_are_bitwise(tmp_path: Path) -> None:
    check("full2", ("fsdp_dtensor",), tmp_path, (How(),) * 3)


AXES: dict[str, tuple[How, ...]] = {
    "readers": tuple(How(readers=count) for count in (0, 2, 1, 3)),
    "persistent": (How(saves="persistent"),) * 4,
    "per save": (How(saves="per_save"),) * 4,
    "now and beside": tuple(How(saves=kind) for kind in ("persistent", None, "per_save", None)),
    "delayed": (How(delayed=True),) * 4,
    "all": (
        How("persistent", 0, True),
        How(None, 2, True),
        How("per_save", 1, True),
        How(None, 0, True),
    ),
}
"""What changes between the four runs of a chain; the run that never stops does as the first, but never saves."""

AXES_LAYOUTS = ("one", "dp2", "full2", "tp2", "pp2", "tp2pp2")


@pytest.mark.timeout(900)
@pytest.mark.full
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("layout", AXES_LAYOUTS)
def test_resumes_with_other_readers_saves_and_scales_are_bitwise(layout: str, axis: str, tmp_path: Path) -> None:
    """6 layouts x 6 axes x 3 resumes: 108 configurations, each format in two of the layouts."""
    check(layout, (FORMATS[AXES_LAYOUTS.index(layout) % len(FORMATS)],), tmp_path, AXES[axis])


def test_a_resume_with_everything_changed_is_bitwise(tmp_path: Path) -> None:
    check("full2", ("dp_reshardable",), tmp_path, AXES["all"][:2])
