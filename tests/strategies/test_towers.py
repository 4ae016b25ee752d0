"""A vision tower in a layout of its own under Lightning trains the same model as one device by hand."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from megalight import checkpoint
from megalight.callbacks import EMA, Adapters
from megalight.errors import ConfigurationError, DataError, LayoutError
from megalight.inference import generate
from megalight.inference.images import prepare_images
from megalight.models.gpt.module import GPTModule
from megalight.models.loading import saved_model
from megalight.models.transforms import Fused
from megalight.models.vlm.module import VLMModule
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.strategies import (
    CheckpointOptions,
    DataParallelOptions,
    Layout,
    MegatronStrategy,
    MegatronTowersStrategy,
    PipelineOptions,
)
from megalight.towers.disjoint import FeatureReceiver
from megalight.types import Loss
from tests.data.multimodal.conftest import png
from tests.models.test_vlm_strategy import CONFIGS, Shares, WithData, by_hand, fit
from tests.models.vlm_samples import CONFIG, IMAGE, QWEN, batch
from tests.strategies.test_checkpoint_formats import contents
from tests.strategies.training import (
    ADAM,
    CLIP,
    SEED,
    From,
    Losses,
    assert_same_gradients,
    assert_same_run,
    gathered,
)
from tests.support.environment import trainer
from tests.support.workers import run

TP = {"tensor_parallel": 2}
SP = {**TP, "sequence_parallel": True}
PP, CP = {"pipeline_parallel": 2}, {"context_parallel": 2}
VPP = {**PP, "virtual_pipeline": 2}
SHARDED = {"data_parallel": DataParallelOptions(level="optim_grads_params")}
GRADS = {"data_parallel": DataParallelOptions(level="optim_grads")}
DISJOINT_LAYOUTS = [
    # Model, images of rows, ranks, layout of the tower, layout of the language model.
    ("qwen", "mixed", 4, Layout(ranks=2, **CP), CP),
    ("deep_qwen", "mixed", 4, Layout(ranks=2), {**VPP, **SHARDED}),
    ("experts", "mixed", 4, Layout(ranks=2), {"expert_parallel": 2, **SHARDED}),
]
FULL_DISJOINT = [
    ("qwen", "mixed", 3, Layout(ranks=2), GRADS),
    ("naflex", "one", 3, Layout(ranks=2, **CP, recompute=RecomputeOptions(granularity="full")), {}),
    ("qwen3", "mixed", 4, Layout(ranks=2, recompute=RecomputeOptions(granularity="full")), SHARDED),
    ("onevision", "mixed", 4, Layout(ranks=2, **SP), SP),
    (
        "qwen",
        "one",
        3,
        Layout(recompute=RecomputeOptions(granularity="full")),
        {**CP, "context": ContextOptions("all_gather")},
    ),
    ("deep", "mixed", 3, Layout(), {**PP, "pipeline": PipelineOptions(schedule="zero_bubble")}),
    ("deep", "none", 3, Layout(), {**PP, "pipeline_layout": "Et|t|t|tL"}),
    ("qwen", "mixed", 4, Layout(ranks=2, **SP), SP),
    ("llava", "one", 3, Layout(), {}),
    ("both_adapters", "mixed", 3, Layout(), SP),
    # Ranks of the tower share the rows of each image; class tokens are left out between their runs.
    ("intern", "mixed", 3, Layout(ranks=2, **CP), {}),
    # Each side shards what it has over replicas of its own.
    ("qwen3", "mixed", 4, Layout(ranks=2), {**PP, **SHARDED}),
    ("experts", "mixed", 3, Layout(), {"expert_parallel": 2}),
    ("aligned", "mixed", 3, Layout(), CP),
    ("deep_qwen", "mixed", 4, Layout(ranks=2, **TP), VPP),
    ("llava", "mixed", 2, Layout(), {}),
    ("qwen", "mixed", 3, Layout(ranks=2), {}),
    ("qwen3", "mixed", 4, Layout(ranks=2, **SP), PP),
    ("tiles", "mixed", 4, Layout(ranks=2), SP),
    ("language_adapters", "mixed", 2, Layout(), {}),
    ("frozen", "mixed", 4, Layout(ranks=2), SHARDED),
    ("llava", "none", 4, Layout(ranks=2, **CP), PP),
    ("qwen3", "one", 6, Layout(ranks=4, **CP), SP),
    ("qwen", "huge", 6, Layout(ranks=4, **SP, **CP), {}),
    ("radio", "mixed", 3, Layout(ranks=2, **CP), {}),
    ("intern", "mixed", 6, Layout(ranks=4, **SP, **CP), CP),
    ("onevision", "mixed", 4, Layout(ranks=2, **CP), SP),
    ("tower_adapters", "mixed", 3, Layout(ranks=2, **CP), {}),
    ("qwen", "mixed", 6, Layout(ranks=4, **CP), SHARDED),
    ("llava", "mixed", 4, Layout(ranks=2), SHARDED),
    ("llava", "none", 4, Layout(ranks=2), SHARDED),
    ("qwen", "mixed", 3, Layout(), SHARDED),
    ("qwen", "one", 6, Layout(ranks=4, **SP), {**CP, **SHARDED}),
    ("language_adapters", "mixed", 4, Layout(ranks=2), SHARDED),
    ("llava", "none", 2, Layout(), {}),
    ("llava", "mixed", 4, Layout(ranks=2, **TP), {}),
    ("llava", "one", 4, Layout(ranks=2), SP),
    ("qwen", "none", 4, Layout(ranks=2), {}),
    ("qwen", "mixed", 3, Layout(), {}),
    ("qwen", "mixed", 6, Layout(ranks=2, **SP), {**SP, **CP}),
    ("qwen", "mixed", 6, Layout(ranks=4, **TP), {**TP}),
    ("deep_qwen", "mixed", 4, Layout(ranks=2), PP),
    ("deep_qwen", "mixed", 6, Layout(ranks=2, **SP), {**SP, **PP}),
    ("deep", "one", 5, Layout(), {**SP, **VPP}),
    ("rates", "mixed", 3, Layout(), SP),
    ("qwen3", "none", 3, Layout(), {**CP}),
    ("deep_qwen3", "one", 4, Layout(ranks=2), VPP),
    ("frozen", "mixed", 4, Layout(ranks=2, **SP), PP),
    ("naflex", "mixed", 4, Layout(ranks=2, **SP), {}),
    ("tower_adapters", "mixed", 4, Layout(ranks=2), {}),
    ("experts", "mixed", 4, Layout(ranks=2), {"expert_parallel": 2}),
    ("experts", "one", 6, Layout(ranks=2, **SP), {**SP, "expert_parallel": 2, "expert_tensor_parallel": 2}),
]
COLOCATED_LAYOUTS = [
    ("both_adapters", "mixed", 2, Layout(**TP), {}),
    # Replicas of the tower are on both stages, which shard other layers; here one of them has none.
    ("deep", "mixed", 4, Layout(), {**PP, "pipeline_layout": "E|ttttL", **SHARDED}),
    ("frozen", "mixed", 2, Layout(), {**SP, **SHARDED}),
]
FULL_COLOCATED = [
    (
        "qwen",
        "mixed",
        4,
        Layout(**CP),
        {"data_parallel": DataParallelOptions(level="optim_grads_params", units=("TransformerLayer",))},
    ),
    ("experts", "mixed", 2, Layout(**SP), {"expert_parallel": 2}),
    ("tiles", "mixed", 2, Layout(), SP),
    ("deep_qwen", "mixed", 4, Layout(**SP), {**VPP, **SHARDED}),
    ("llava", "none", 2, Layout(), {**PP, **GRADS}),
    ("deep", "mixed", 4, Layout(), {**PP, "pipeline": PipelineOptions(schedule="zero_bubble"), **SHARDED}),
    (
        "deep",
        "mixed",
        4,
        Layout(**CP),
        {**PP, **SP, "data_parallel": DataParallelOptions(level="optim_grads_params", units=("TransformerLayer",))},
    ),
    ("qwen3", "mixed", 2, Layout(), SP),
    ("qwen", "mixed", 2, Layout(**CP), SP),
    ("llava", "mixed", 2, Layout(**TP), SHARDED),
    # Each model shards over its own replicas: four of the tower, two of the language model.
    ("qwen3", "mixed", 4, Layout(), {**SP, **SHARDED}),
    ("llava", "none", 2, Layout(), {**SP, **GRADS}),
    ("qwen3", "mixed", 4, Layout(), {**PP, **SHARDED}),
    ("qwen3", "huge", 4, Layout(**CP), {**PP, **SHARDED}),
    ("frozen", "mixed", 4, Layout(), {**PP, **SHARDED}),
    ("both_adapters", "one", 4, Layout(), {**PP, **SHARDED}),
    ("experts", "mixed", 4, Layout(), {**PP, "expert_parallel": 2, **SHARDED}),
]


def strategy_of(options: dict[str, Any]) -> MegatronStrategy:
    """The strategy of these options."""
    kind = MegatronTowersStrategy if "tower" in options else MegatronStrategy
    return kind(**{"micro_batch_size": 1, **options})


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks hold together."""
    whole = dict(found[0])
    for what in ("initial", "final", "gradients"):
        whole[what] = {key: value for rank in found for key, value in rank[what].items()}
    return whole


@pytest.mark.parametrize(
    "layout", [*DISJOINT_LAYOUTS, *(pytest.param(each, marks=pytest.mark.full) for each in FULL_DISJOINT)], ids=str
)
def test_layout_trains_the_same_model(layout: tuple[str, str, int, Layout, dict[str, Any]]) -> None:
    name, counts, ranks, tower, language = layout
    options = {"placement": "disjoint", "tower": tower, **language, "micro_batch_size": 1}
    found, expected = run(fit, ranks, name, counts, options, timeout=240), by_hand(name, counts)
    for rank in found:
        assert rank["losses"] == found[0]["losses"], "ranks report different losses"
        assert rank["norms"] == found[0]["norms"], "ranks report different norms"
    whole = joined(found)
    assert whole["gradients"].keys() == expected["gradients"].keys()
    assert_same_gradients(whole["gradients"], expected["gradients"])
    assert_same_run(whole, expected)


@pytest.mark.parametrize(
    "layout", [*COLOCATED_LAYOUTS, *(pytest.param(each, marks=pytest.mark.full) for each in FULL_COLOCATED)], ids=str
)
def test_colocated_layout_trains_the_same_model(layout: tuple[str, str, int, Layout, dict[str, Any]]) -> None:
    name, counts, ranks, tower, language = layout
    options = {"tower": tower, **language, "micro_batch_size": 1}
    whole, expected = joined(run(fit, ranks, name, counts, options, timeout=240)), by_hand(name, counts)
    assert_same_gradients(whole["gradients"], expected["gradients"])
    assert_same_run(whole, expected)


def _with_lengths(options: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Train adapters that learn the lengths of rows of weights, which need the values of these."""
    strategy, losses = strategy_of(options), Losses()
    module = WithData(CONFIG, optimizer=ADAM, seed=SEED)
    adapters = Adapters(rank=3, alpha=6.0, dora=True, targets=["layers.*", "projector.*"])
    trainer(strategy, callbacks=[losses, adapters], max_steps=2, use_distributed_sampler=False).fit(module)
    return losses.losses, gathered(strategy, module)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(3, {"placement": "disjoint", "tower": Layout(), **TP}, marks=pytest.mark.full),
        (2, {"tower": Layout(**TP)}),
    ],
    ids=["disjoint", "colocated"],
)
def test_adapters_with_lengths_learn_the_same(ranks: int, options: dict[str, Any]) -> None:
    losses, expected = run(_with_lengths, 1, {})[0]
    found = run(_with_lengths, ranks, options)
    final = {name: value for _, held in found for name, value in held.items()}
    assert any("magnitude" in name for name in final)
    assert final.keys() == expected.keys()
    for name, value in final.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)
    assert all(rank == pytest.approx(losses, rel=1e-9) for rank, _ in found)


class Validated(WithData):
    """Validates on other rows than it trains on."""

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.trainer.global_step, "mixed")

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(0, "one")

    def _loader(self, start: int, counts: str) -> DataLoader[Any]:
        share = self.trainer.strategy.distributed_sampler_kwargs
        rows = Shares("deep_qwen", counts, share["num_replicas"], share["rank"])
        return DataLoader(rows, batch_size=None, sampler=From(start, len(rows)))


def go_on(options: dict[str, Any], steps: int, save: str, resume: str | None = None) -> dict[str, float]:
    """Train up to a step, validate with averaged weights after each, and save."""
    strategy = strategy_of(options)
    module = Validated(CONFIGS["deep_qwen"], optimizer=ADAM, seed=SEED)
    runner = trainer(
        strategy,
        callbacks=[EMA(0.8)],
        max_steps=steps,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        val_check_interval=1,
    )
    runner.fit(module, ckpt_path=resume)
    runner.save_checkpoint(save)
    return {name: float(value) for name, value in runner.callback_metrics.items()}


DISJOINT = (4, {"placement": "disjoint", "tower": Layout(ranks=2, **SP), **PP})
DISJOINT_SHARDED = (4, {"placement": "disjoint", "tower": Layout(ranks=2), **SHARDED})
COLOCATED = (4, {"tower": Layout(), **SP, **PP})
COLOCATED_SHARDED = (2, {"tower": Layout(), **SP, **SHARDED})
STAGES_SHARDED = (4, {"tower": Layout(), **PP, **SHARDED})
DISJOINT_CP = (3, {"placement": "disjoint", "tower": Layout(ranks=2, **CP)})
COLOCATED_CP = (2, {"tower": Layout(**CP), **SP})
ALONE = (1, {})
OTHER = (
    2,
    {"tower": Layout(recompute=RecomputeOptions(granularity="full"), **SP)},
)
TOGETHER = (2, SP)


@functools.cache
def alone(folder: Path) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    (expected,) = run(go_on, 1, {}, 2, str(folder / "alone"))
    return expected, contents(folder / "alone")


@pytest.mark.parametrize(
    "order",
    [
        pytest.param((DISJOINT, DISJOINT), marks=pytest.mark.full),
        pytest.param((DISJOINT, TOGETHER), marks=pytest.mark.full),
        pytest.param((TOGETHER, DISJOINT), marks=pytest.mark.full),
        pytest.param((COLOCATED, COLOCATED), marks=pytest.mark.full),
        pytest.param((OTHER, TOGETHER), marks=pytest.mark.full),
        pytest.param((DISJOINT, OTHER), marks=pytest.mark.full),
        pytest.param((DISJOINT_SHARDED, TOGETHER), marks=pytest.mark.full),
        pytest.param((COLOCATED_SHARDED, DISJOINT_SHARDED), marks=pytest.mark.full),
        pytest.param((STAGES_SHARDED, DISJOINT_SHARDED), marks=pytest.mark.full),
        pytest.param((DISJOINT, DISJOINT_SHARDED), marks=pytest.mark.full),
        pytest.param((STAGES_SHARDED, TOGETHER), marks=pytest.mark.full),
        pytest.param((TOGETHER, STAGES_SHARDED), marks=pytest.mark.full),
        pytest.param((DISJOINT_CP, ALONE), marks=pytest.mark.full),
        (COLOCATED_SHARDED, ALONE),
        (ALONE, COLOCATED_CP),
        pytest.param((COLOCATED_CP, DISJOINT_CP), marks=pytest.mark.full),
        pytest.param((COLOCATED_CP, ALONE), marks=pytest.mark.full),
        pytest.param((DISJOINT_CP, COLOCATED), marks=pytest.mark.full),
        pytest.param((DISJOINT, DISJOINT_CP), marks=pytest.mark.full),
    ],
    ids=[
        "disjoint",
        "disjoint-together",
        "together-disjoint",
        "colocated",
        "colocated-together",
        "disjoint-colocated",
        "sharded-together",
        "colocated_sharded-disjoint_sharded",
        "stages_sharded-disjoint_sharded",
        "disjoint-sharded",
        "stages_sharded-together",
        "together-stages_sharded",
        "disjoint_cp-alone",
        "colocated_sharded-alone",
        "alone-colocated_cp",
        "colocated_cp-disjoint_cp",
        "colocated_cp-alone",
        "disjoint_cp-colocated",
        "disjoint-disjoint_cp",
    ],
)
def test_runs_go_on_in_any_layout(
    order: tuple[tuple[int, dict[str, Any]], ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected, whole = alone(tmp_path_factory.getbasetemp())
    (ranks, options), (later_ranks, later) = order
    half, end = (str(tmp_path_factory.mktemp("run") / name) for name in ("half", "end"))
    run(go_on, ranks, options, 1, half)
    for found in run(go_on, later_ranks, later, 2, end, half):
        assert found == pytest.approx(expected, rel=1e-9)
    stored = contents(end)
    assert stored.keys() == whole.keys()
    assert any(name.startswith("ema.model.embed.tower.") for name in stored)
    for name, value in whole.items():
        torch.testing.assert_close(stored[name], value, rtol=1e-9, atol=1e-12)


def _adapted(options: dict[str, Any], steps: int, save: str, resume: str | None = None) -> list[float]:
    """Train adapters of both towers up to a step, and save."""
    strategy, losses = strategy_of(options), Losses()
    module = WithData(CONFIG, optimizer=ADAM, seed=SEED)
    callbacks = [losses, Adapters(rank=3, alpha=6.0, targets=["layers.*", "projector.*"])]
    runner = trainer(strategy, callbacks=callbacks, max_steps=steps, use_distributed_sampler=False)
    runner.fit(module, ckpt_path=resume)
    runner.save_checkpoint(save)
    return losses.losses


@pytest.mark.parametrize(
    "order",
    [
        ((2, {"placement": "disjoint", "tower": Layout()}), ALONE),
        pytest.param((DISJOINT, TOGETHER), marks=pytest.mark.full),
        pytest.param((TOGETHER, COLOCATED), marks=pytest.mark.full),
    ],
    ids=["disjoint-alone", "disjoint-together", "together-colocated"],
)
def test_adapters_go_on_in_any_layout(order: tuple[tuple[int, dict[str, Any]], ...], tmp_path: Path) -> None:
    (ranks, options), (later_ranks, later) = order
    half, end, alone = (str(tmp_path / name) for name in ("half", "end", "alone"))
    expected = run(_adapted, 1, {}, 2, alone)[0]
    first = run(_adapted, ranks, options, 1, half)[0]
    second = run(_adapted, later_ranks, later, 2, end, half)[0]
    assert [*first, *second] == pytest.approx(expected, rel=1e-9)
    stored, whole = contents(end), contents(alone)
    assert any(".lora_" in name and ".tower." in name for name in stored)
    assert stored.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(stored[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "layout", [DISJOINT, pytest.param(COLOCATED, marks=pytest.mark.full)], ids=["disjoint", "colocated"]
)
def test_checkpoints_of_either_layout_generate(
    layout: tuple[int, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The tokens after prompts with images are those of a run on one device."""
    pytest.importorskip("PIL")
    answers = []
    own, shared = tmp_path_factory.mktemp("generate") / "own", tmp_path_factory.getbasetemp()
    run(go_on, layout[0], layout[1], 2, str(own))
    alone(shared)
    for folder in (own, shared / "alone"):
        model = saved_model(checkpoint.open(folder), dtype=torch.float64).root.eval()
        asked, packed_images, axes = prepare_images(model.config, [[1, IMAGE, 5, 6], [7]], [[png(16, 8)], []])
        answers.append(
            generate(model, asked, max_new_tokens=8, temperature=0, packed_images=packed_images, axis_positions=axes)
        )
    assert answers[0] == answers[1]


def small(**options: Any) -> MegatronTowersStrategy:
    """A strategy of four processes that nobody has started."""
    strategy = MegatronTowersStrategy(placement="disjoint", **options)
    strategy.grid(4)
    return strategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tower": Layout(ranks=4)}, r"tower\.ranks=4 leaves no rank of 4"),
        ({"tower": Layout(ranks=1), **TP}, r"the language model, on 3 ranks from 1 on: world size 3 is not a multiple"),
        ({"tower": Layout(ranks=3, **TP)}, r"the tower, on 3 ranks from 0 on: world size 3 is not a multiple"),
        ({"tower": Layout(ranks=2, pipeline_parallel=2)}, r"the tower has pipeline_parallel=2"),
        ({"tower": Layout(expert_parallel=2)}, r"the tower has expert_parallel=2, expert_tensor_parallel=1; it has no"),
        ({"expert_parallel": 2}, r"the language model, on 3 ranks from 1 on"),
        ({"micro_batch_size": "auto"}, r"micro_batch_size='auto' with a disjoint tower"),
        ({"checkpoints": CheckpointOptions(format="dp_reshardable")}, r"format='dp_reshardable' with a disjoint tower"),
    ],
    ids=str,
)
def test_bad_layouts_are_refused_before_processes(options: dict[str, Any], message: str) -> None:
    with pytest.raises((LayoutError, ConfigurationError), match=message):
        small(**options)


@pytest.mark.parametrize("degrees", [(2, 3), (3, 2)])
def test_degrees_must_divide_each_other(degrees: tuple[int, int]) -> None:
    strategy = MegatronTowersStrategy(tower=Layout(ranks=degrees[0]), placement="disjoint")
    with pytest.raises(LayoutError, match="one must divide the other"):
        strategy.grid(sum(degrees))


class Own(VLMModule):
    """Has a step of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        raise AssertionError


class Distilled(VLMModule):
    """Has another model beside."""

    def frozen_models(self) -> Any:
        return {"teacher": None}


class Adding(Callback):
    """Adds a transform to the module."""

    def attach(self, module: VLMModule) -> None:
        module.transforms.append(Fused())


def _refused(modules: Sequence[tuple[Any, list[Callback]]]) -> list[str]:
    found = []
    for module, callbacks in modules:
        runner = trainer(MegatronTowersStrategy(placement="disjoint"), callbacks=callbacks)
        with pytest.raises(ConfigurationError) as error:
            runner.fit(module, DataLoader([batch()], batch_size=None))
        found.append(str(error.value))
    return found


def _holding() -> str:
    sharing = DataParallelOptions(level="optim_grads_params", units=("ImageTextEmbedding",))
    module = WithData(CONFIG, optimizer=ADAM, seed=SEED)
    try:
        trainer(MegatronTowersStrategy(data_parallel=sharing), use_distributed_sampler=False).fit(module)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_unit_that_holds_a_colocated_tower_is_refused() -> None:
    message = "units names ImageTextEmbedding, which holds a part with a layout of its own"
    assert all(message in told for told in run(_holding, 2))


def test_what_needs_the_whole_model_is_refused() -> None:
    modules = [GPTModule(CONFIG.language), Own(CONFIG), VLMModule(CONFIG), Distilled(CONFIG)]
    messages = [
        "needs a VLMModule, and GPTModule is none",
        "Own defines training_step, which no rank can run whole",
        "the transform Fused with a disjoint tower is not supported",
        "Distilled has frozen_models, which read whole micro-batches",
    ]
    callbacks = [[], [], [Adding()], []]
    for found in run(_refused, 2, list(zip(modules, callbacks, strict=True))):
        assert [message for message, told in zip(messages, found, strict=True) if message not in told] == []


class Sent:
    """A bridge over which features of two rows come."""

    def recv_forward(self) -> dict[str, torch.Tensor]:
        return {"features": torch.zeros(2, 32)}


def test_other_samples_on_the_ranks_of_the_tower_are_told() -> None:
    arrivals = FeatureReceiver(Sent(), 3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"sent 2 rows of features for .* images have 10: its ranks read other samples"):
        arrivals(batch((1, 0, 1, 0)))
    assert len(arrivals(batch((1,), config=QWEN))) == 3  # whole shares of three


class Uneven(VLMModule):
    """Replicas validate on different numbers of batches."""

    def val_dataloader(self) -> DataLoader[Any]:
        share = self.trainer.strategy.distributed_sampler_kwargs
        every = [batch((1, 0), seed=0), batch((0, 2), seed=1), batch((3, 1), seed=2)]
        return DataLoader(every[share["rank"] :: share["num_replicas"]], batch_size=None)


def _validated(options: dict[str, Any]) -> dict[str, float]:
    runner = trainer(strategy_of(options), use_distributed_sampler=False)
    runner.validate(Uneven(CONFIG, seed=SEED), verbose=False)
    return {name: float(value) for name, value in runner.callback_metrics.items()}


def test_colocated_replicas_validate_on_different_numbers_of_batches() -> None:
    (expected,) = run(_validated, 1, {})
    for found in run(_validated, 2, {"tower": Layout(**TP)}):
        assert found == pytest.approx(expected, rel=1e-9)


class Logging(Validated):
    """Logs in its steps: means over replicas, and what one of them has."""

    def forward_step(self, model: Any, batch: Any, carry: Any = None) -> Any:
        if carry is None:
            self.log("rows", len(batch), reduce_fx="sum", on_step=False, on_epoch=True)
        return super().forward_step(model, batch, carry)

    def loss_step(self, carry: Any, batch: Any) -> Loss:
        loss = super().loss_step(carry, batch)
        self.log("own", loss.sum.detach(), sync_dist=True, on_step=not self.trainer.validating, on_epoch=True)
        self.log("here", loss.sum.detach(), on_step=True, on_epoch=True)
        return loss


def _watched(folder: str, options: dict[str, Any]) -> tuple[dict[str, float], float, int]:
    """All metrics of a run, the best mean of what its steps log, and the epoch in which it ended."""
    best = ModelCheckpoint(folder, "{epoch}", monitor="own_epoch", save_top_k=1)
    early = EarlyStopping("own_epoch", patience=0, mode="max", check_on_train_epoch_end=True)
    runner = trainer(
        strategy_of(options),
        callbacks=[best, early],
        enable_checkpointing=True,
        max_epochs=3,
        max_steps=-1,
        use_distributed_sampler=False,
    )
    runner.fit(Logging(CONFIGS["deep_qwen"], optimizer=ADAM, seed=SEED))
    assert Path(best.best_model_path).exists()
    metrics = {name: float(value) for name, value in runner.callback_metrics.items()}
    assert best.best_model_score is not None
    return metrics, float(best.best_model_score), runner.current_epoch


@functools.cache
def watched_whole(replicas: int, folder: str) -> list[tuple[dict[str, float], float, int]]:
    """The run of :func:`_watched` on as many replicas of the whole model."""
    return run(_watched, replicas, folder, {})


@pytest.mark.parametrize(
    ("options", "replicas"),
    [
        pytest.param({"placement": "disjoint", "tower": Layout()}, (0, 0), marks=pytest.mark.full),
        pytest.param({"placement": "disjoint", "tower": Layout()}, (0, 0, 1), marks=pytest.mark.full),
        pytest.param({"placement": "disjoint", "tower": Layout(ranks=2)}, (0, 0, 0), marks=pytest.mark.full),
        ({"placement": "disjoint", "tower": Layout(), **VPP}, (0, 0, 0)),
        pytest.param({"placement": "disjoint", "tower": Layout(ranks=2)}, (0, 1, 0, 1), marks=pytest.mark.full),
    ],
    ids=["one each", "two replicas", "two towers", "pipeline", "two lanes"],
)
def test_what_steps_log_can_be_watched_on_all_ranks(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any], replicas: tuple[int, ...]
) -> None:
    whole = watched_whole(max(replicas) + 1, str(tmp_path_factory.getbasetemp() / "whole"))
    found = run(_watched, len(replicas), str(tmp_path_factory.mktemp("disjoint")), options)
    for (metrics, *best), replica in zip(found, replicas, strict=True):
        expected, *best_of_whole = whole[replica]
        assert metrics == pytest.approx(expected, rel=1e-9)
        assert best == pytest.approx(best_of_whole, rel=1e-9)


class Predicting(VLMModule):
    """Predicts on as many batches as replicas."""

    def predict_dataloader(self) -> DataLoader[Any]:
        share = self.trainer.strategy.distributed_sampler_kwargs
        every = [batch((1, 0, 2, 1), seed=0), batch((0, 2, 0, 0), seed=1), batch((3, 1, 0, 1), seed=2)]
        return DataLoader(every[share["rank"] :: share["num_replicas"]], batch_size=None)


def _predicted(options: dict[str, Any]) -> list[Any]:
    found = trainer(strategy_of(options), use_distributed_sampler=False).predict(Predicting(CONFIG, seed=SEED)) or []
    return [None if each is None else each.numpy() for each in found]


def test_every_rank_gets_the_outputs_of_its_samples() -> None:
    expected = run(_predicted, 1, {})[0]
    for found in run(_predicted, 2, {"tower": Layout(**TP)}):
        # The second replica has one batch less, and an empty one in its place.
        mine = [expected[0], expected[2]] if found[1] is not None else [expected[1]]
        assert_equal(found[: len(mine)], mine)
    tower, *replicas = run(_predicted, 3, {"placement": "disjoint", "tower": Layout(), "pipeline_parallel": 2})
    assert_equal(tower, expected)
    assert all(len(found) == 3 for found in replicas)
    tower, first, second = run(_predicted, 3, {"placement": "disjoint", "tower": Layout()})
    assert_equal(tower, expected)
    assert_equal([np.concatenate(pair) for pair in zip(first, second, strict=True)], expected)


def assert_equal(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lanes", [1, 2])
def test_lanes_validate_on_different_numbers_of_batches(lanes: int) -> None:
    (expected,) = run(_validated, 1, {})
    for found in run(
        _validated, 1 + lanes if lanes == 1 else 4, {"placement": "disjoint", "tower": Layout(ranks=lanes)}
    ):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tower": Layout(ranks=2)}, r"the tower has ranks=2, and there are 4 processes, which colocated models share"),
        ({"tower": Layout(tensor_parallel=3)}, r"the tower: world size 4 is not a multiple"),
        ({"tensor_parallel": 3}, r"the language model: world size 4 is not a multiple"),
        ({"expert_parallel": 3}, r"world size 4"),
        ({"placement": "beside"}, r"placement='beside'; choose one of colocated, disjoint"),
    ],
    ids=str,
)
def test_bad_colocated_layouts_are_refused_before_processes(options: dict[str, Any], message: str) -> None:
    with pytest.raises((LayoutError, ConfigurationError), match=message):
        MegatronTowersStrategy(**options).grid(4)
