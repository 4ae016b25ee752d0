"""A vision tower on ranks of its own under Lightning trains the same model as one device by hand."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from megalight.callbacks import EMA
from megalight.callbacks.graphs import reasons_against
from megalight.errors import ConfigurationError, DataError, LayoutError
from megalight.models.gpt.module import GPTModule
from megalight.models.transforms import LoRA
from megalight.models.vlm.module import VLMModule
from megalight.parallel.context.options import ContextOptions
from megalight.parallel.recompute import Recompute
from megalight.strategies import (
    Checkpoints,
    DataParallel,
    MegatronStrategy,
    MegatronTowersBesideStrategy,
    MegatronTowersStrategy,
    Pipeline,
    Side,
)
from megalight.towers.arriving import Arrivals
from tests.environment import trainer
from tests.models.test_vlm_strategy import CONFIGS, Shares, WithData, by_hand, fit
from tests.models.vlm_samples import CONFIG, QWEN, batch
from tests.strategies.test_checkpoint_formats import contents
from tests.strategies.training import ADAM, CLIP, SEED, From, assert_same_gradients, assert_same_run
from tests.workers import run

TP = {"tensor_parallel": 2}
SP = {**TP, "sequence_parallel": True}
PP, CP = {"pipeline_parallel": 2}, {"context_parallel": 2}
VPP = {**PP, "virtual_pipeline": 2}
CHOSEN = [
    # Model, images of rows, ranks, layout of the tower, layout of the language model.
    ("llava", "mixed", 2, Side(), {}),
    ("qwen", "mixed", 4, Side(ranks=2, **SP), SP),
    ("llava", "one", 3, Side(), {}),
    ("qwen", "mixed", 3, Side(ranks=2), {}),
    ("deep_qwen", "mixed", 4, Side(ranks=2, **TP), VPP),
    ("aligned", "mixed", 3, Side(), CP),
]
FULL = [
    ("llava", "none", 2, Side(), {}),
    ("onevision", "mixed", 4, Side(ranks=2, **SP), SP),
    ("llava", "mixed", 4, Side(ranks=2, **TP), {}),
    ("llava", "one", 4, Side(ranks=2), SP),
    ("qwen", "none", 4, Side(ranks=2), {}),
    ("qwen", "mixed", 3, Side(), {}),
    ("qwen", "mixed", 6, Side(ranks=2, **SP), {**SP, **CP}),
    ("qwen", "mixed", 6, Side(ranks=4, **TP), {**TP}),
    ("qwen", "one", 3, Side(recompute=Recompute(granularity="full")), {**CP, "context": ContextOptions("all_gather")}),
    ("deep_qwen", "mixed", 4, Side(ranks=2), PP),
    ("deep_qwen", "mixed", 6, Side(ranks=2, **SP), {**SP, **PP}),
    ("deep", "mixed", 3, Side(), {**PP, "pipeline": Pipeline(schedule="zero_bubble")}),
    ("deep", "one", 5, Side(), {**SP, **VPP}),
    ("deep", "none", 3, Side(), {**PP, "pipeline_layout": "Et|t|t|tL"}),
    ("rates", "mixed", 3, Side(), SP),
]


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks hold together."""
    whole = dict(found[0])
    for what in ("initial", "final", "gradients"):
        whole[what] = {key: value for rank in found for key, value in rank[what].items()}
    return whole


@pytest.mark.parametrize("layout", [*CHOSEN, *(pytest.param(each, marks=pytest.mark.full) for each in FULL)], ids=str)
def test_layout_trains_the_same_model(layout: tuple[str, str, int, Side, dict[str, Any]]) -> None:
    name, counts, ranks, tower, language = layout
    options = {"tower": tower, **language, "micro_batch_size": 1}
    found, expected = run(fit, ranks, name, counts, options, timeout=240), by_hand(name, counts)
    for rank in found:
        assert rank["losses"] == found[0]["losses"], "ranks report different losses"
        assert rank["norms"] == found[0]["norms"], "ranks report different norms"
    whole = joined(found)
    assert whole["gradients"].keys() == expected["gradients"].keys()
    assert_same_gradients(whole["gradients"], expected["gradients"])
    assert_same_run(whole, expected)


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
    options = dict(options)
    kind = options.pop("kind", MegatronStrategy)
    strategy = kind(micro_batch_size=1, **options)
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


APART = (4, {"kind": MegatronTowersStrategy, "tower": Side(ranks=2, **SP), **PP})
BESIDE = (4, {"kind": MegatronTowersBesideStrategy, "tower": Side(), **SP, **PP})
OTHER = (2, {"kind": MegatronTowersBesideStrategy, "tower": Side(recompute=Recompute(granularity="full"), **SP)})
TOGETHER = (2, SP)


@functools.cache
def alone(folder: Path) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    (expected,) = run(go_on, 1, {}, 3, str(folder / "alone"))
    return expected, contents(folder / "alone")


@pytest.mark.parametrize(
    "order",
    [(APART, APART), (APART, TOGETHER), (TOGETHER, APART), (BESIDE, BESIDE), (OTHER, TOGETHER), (APART, OTHER)],
    ids=["apart", "apart-together", "together-apart", "beside", "beside-together", "apart-beside"],
)
def test_runs_go_on_in_any_layout(
    order: tuple[tuple[int, dict[str, Any]], ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected, whole = alone(tmp_path_factory.getbasetemp())
    (ranks, options), (later_ranks, later) = order
    half, end = (str(tmp_path_factory.mktemp("run") / name) for name in ("half", "end"))
    run(go_on, ranks, options, 2, half)
    for found in run(go_on, later_ranks, later, 3, end, half):
        assert found == pytest.approx(expected, rel=1e-9)
    stored = contents(end)
    assert stored.keys() == whole.keys()
    assert any(name.startswith("ema.model.embed.tower.") for name in stored)
    for name, value in whole.items():
        torch.testing.assert_close(stored[name], value, rtol=1e-9, atol=1e-12)


def small(**options: Any) -> MegatronTowersStrategy:
    """A strategy of four processes that nobody has started."""
    strategy = MegatronTowersStrategy(**options)
    strategy.grid(4)
    return strategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tower": Side(ranks=4)}, r"tower\.ranks=4 leaves no rank of 4"),
        ({"tower": Side(ranks=1), **TP}, r"the language model, on 3 ranks from 1 on: world size 3 is not a multiple"),
        ({"tower": Side(ranks=3, **TP)}, r"the tower, on 3 ranks from 0 on: world size 3 is not a multiple"),
        ({"tower": Side(ranks=2, pipeline_parallel=2)}, r"the tower has pipeline_parallel=2"),
        ({"tower": Side(ranks=2, **CP)}, r"the tower has context_parallel=2; images are not cut"),
        ({"expert_parallel": 2}, r"expert_parallel=2, expert_tensor_parallel=1 with a tower"),
        ({"data_parallel": DataParallel(level="optim_grads")}, r"level='optim_grads' with a tower"),
        ({"micro_batch_size": "auto"}, r"micro_batch_size='auto' with a tower"),
        ({"checkpoints": Checkpoints(format="dp_reshardable")}, r"format='dp_reshardable' with a tower"),
    ],
    ids=str,
)
def test_bad_layouts_are_refused_before_processes(options: dict[str, Any], message: str) -> None:
    with pytest.raises((LayoutError, ConfigurationError), match=message):
        small(**options)


@pytest.mark.parametrize("degrees", [(2, 3), (3, 2)])
def test_degrees_must_divide_each_other(degrees: tuple[int, int]) -> None:
    strategy = MegatronTowersStrategy(tower=Side(ranks=degrees[0]))
    with pytest.raises(LayoutError, match="one must divide the other"):
        strategy.grid(sum(degrees))


class Own(VLMModule):
    """Has a step of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        raise AssertionError


class Adding(Callback):
    """Adds a transform to the module, as adapters do."""

    def attach(self, module: VLMModule) -> None:
        module.transforms.append(LoRA(rank=2, targets=["layers.*"]))


def _refused(verb: str, module: Any, callbacks: list[Callback]) -> str:
    runner = trainer(MegatronTowersStrategy(), callbacks=callbacks)
    loader = DataLoader([batch()], batch_size=None)
    try:
        getattr(runner, verb)(module, loader)
    except (ConfigurationError, LayoutError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("verb", "module", "callbacks", "message"),
    [
        ("fit", GPTModule(CONFIG.language), [], "needs a VLMModule, and GPTModule is none"),
        ("fit", Own(CONFIG), [], "Own defines training_step, which no rank can run whole"),
        ("fit", VLMModule(CONFIG), [Adding()], "transforms (adapters) with a tower"),
        ("fit", VLMModule(CONFIG, freeze=["*.tower.*", "*.projector.*"]), [], "nothing is left to train"),
        ("predict", VLMModule(CONFIG), [], "predict with a tower on ranks of its own"),
    ],
    ids=["gpt", "own", "adapters", "frozen", "predict"],
)
def test_what_needs_the_whole_model_is_refused(verb: str, module: Any, callbacks: list[Callback], message: str) -> None:
    assert all(message in found for found in run(_refused, 2, verb, module, callbacks))


def test_steps_are_not_recorded() -> None:
    for strategy in (MegatronTowersStrategy(), MegatronTowersBesideStrategy()):
        assert "its messages change with the images" in next(reasons_against.of_strategy(strategy))
    assert not list(reasons_against.of_strategy(MegatronStrategy()))


class Sent:
    """A bridge over which features of two rows come."""

    def recv_forward(self) -> dict[str, torch.Tensor]:
        return {"features": torch.zeros(2, 32)}


def test_other_samples_on_the_ranks_of_the_tower_are_told() -> None:
    arrivals = Arrivals(Sent(), 3)  # type: ignore[arg-type]
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
    options = dict(options)
    runner = trainer(
        options.pop("kind", MegatronStrategy)(micro_batch_size=1, **options), use_distributed_sampler=False
    )
    runner.validate(Uneven(CONFIG, seed=SEED), verbose=False)
    return {name: float(value) for name, value in runner.callback_metrics.items()}


def test_replicas_beside_validate_on_different_numbers_of_batches() -> None:
    (expected,) = run(_validated, 1, {})
    for found in run(_validated, 2, {"kind": MegatronTowersBesideStrategy, "tower": Side(**TP)}):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tower": Side(ranks=2)}, r"tower\.ranks=2, and there are 4 processes, which both models share"),
        ({"tower": Side(tensor_parallel=3)}, r"the tower: world size 4 is not a multiple"),
        ({"tower": Side(**CP)}, r"the tower has context_parallel=2"),
        ({"tensor_parallel": 3}, r"world size 4 is not a multiple"),
        ({"expert_parallel": 2}, r"expert_parallel=2, expert_tensor_parallel=1 with a tower in a layout of its own"),
    ],
    ids=str,
)
def test_bad_layouts_beside_are_refused_before_processes(options: dict[str, Any], message: str) -> None:
    with pytest.raises((LayoutError, ConfigurationError), match=message):
        MegatronTowersBesideStrategy(**options).grid(4)
