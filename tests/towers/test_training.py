"""A tower in a layout of its own and its language model train the same model as a single device by hand."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalight.errors import ConfigurationError, DataError, LayoutError
from megalight.models.transforms import LoRA
from megalight.models.vlm import VLM
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.data_parallel.unshard import Unsharder
from megalight.parallel.layout import Layout
from megalight.parallel.pipeline.schedules import PipelineOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.towers import TowersTraining
from megalight.towers.disjoint import TowerRunner
from megalight.towers.placement import balanced, consecutive
from tests.models.test_vlm_strategy import ADAPTERS, CONFIGS, COUNTS, FREEZE, by_hand, rows_of
from tests.models.vlm_samples import batch
from tests.strategies.training import ADAM, CLIP, SEED, assert_same_gradients, gathered, reduced
from tests.support.workers import run

Row: TypeAlias = tuple[str, str, int, Layout, dict[str, Any]]


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    every = list(parameters)
    # As many groups on each stage of a pipeline.
    groups = [
        {"params": [p for p in every if p.ndim > 1], "weight_decay": ADAM.weight_decay},
        {"params": [p for p in every if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=ADAM.lr, betas=ADAM.betas, eps=ADAM.eps)


def make(name: str, tower: Layout, language: dict[str, Any], **options: Any) -> TowersTraining:
    """A run of a case; a disjoint language model has the ranks that the tower leaves."""
    adapters = (LoRA(rank=3, alpha=6.0, **ADAPTERS[name]),) if name in ADAPTERS else ()
    sharing = DataParallelOptions(level="no_shard", overlap_param_gather=False)
    disjoint = options.get("placement") == "disjoint" and dist.is_initialized()
    ranks = dist.get_world_size() - tower.ranks if disjoint else 1
    return TowersTraining(
        CONFIGS[name],
        tower=tower,
        language=Layout(**{"transforms": adapters, "data_parallel": sharing, "ranks": ranks, **language}),
        optimizer=adam,
        seed=SEED,
        dtype=torch.float64,
        freeze=options.pop("freeze", FREEZE.get(name, ())),
        **options,
    )


def train(
    name: str, counts: str, tower: Layout, language: dict[str, Any], placement: Any, uneven: bool = False
) -> dict[str, Any]:
    """All steps of :func:`by_hand`. Ranks tell what they hold.

    Args:
        uneven: later replicas have larger and fewer micro-batches. Otherwise these have one row.
    """
    made = make(name, tower, language, placement=placement)
    model, engine = made.model, made.engine
    run = SimpleNamespace(parallel_model=model, engine=engine, sync_parameters=engine.sync_parameters, model=model.root)
    data = made.placed.language.dp
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step, each in enumerate(COUNTS[counts]):
        rows = rows_of(name, each, step)
        shares = rows.split(len(rows) // data)
        parts = [share.split(1 + number * uneven) for number, share in enumerate(shares)]
        found["losses"].append(float(made.forward_backward(parts.__getitem__)))
        if not step:
            found["gradients"] = reduced(run)
        found["norms"].append(float(made.clip_grad_norm(CLIP)))
        made.optimizer.step()
    return {**found, "final": gathered(run, run)}


TP = {"tensor_parallel": 2}
SP = {**TP, "sequence_parallel": True}
PP, CP = {"pipeline_parallel": 2}, {"context_parallel": 2}
VPP = {**PP, "virtual_pipeline": 2}
SHARDED = {"data_parallel": DataParallelOptions(level="optim_grads_params")}
UNITS = {"data_parallel": DataParallelOptions(level="optim_grads_params", units=("TransformerLayer",))}
GRADS = {"data_parallel": DataParallelOptions(level="optim_grads")}
# Model, images of rows, ranks, layout of the tower, layout of the language model.
DISJOINT = [
    ("onevision", "mixed", 4, Layout(ranks=2, **SP), SP),
    (
        "qwen",
        "one",
        3,
        Layout(recompute=RecomputeOptions(granularity="full")),
        {**CP, "context": ContextOptions("all_gather")},
    ),
    ("qwen3", "mixed", 4, Layout(ranks=2, recompute=RecomputeOptions(granularity="full")), SHARDED),
    # Two chunks per rank: the first one starts four micro-batches before a gradient returns.
    ("deep_qwen", "mixed", 3, Layout(), {**PP, "pipeline_layout": "Et|t|t|tL"}),
    ("qwen", "mixed", 3, Layout(ranks=2), GRADS),
    ("naflex", "one", 3, Layout(ranks=2, **CP, recompute=RecomputeOptions(granularity="full")), {}),
    ("deep", "mixed", 3, Layout(), {**PP, "pipeline": PipelineOptions(schedule="zero_bubble")}),
]
FULL_DISJOINT = [
    ("deep_qwen", "one", 3, Layout(), PP),
    ("both_adapters", "mixed", 3, Layout(ranks=2, **SP), {}),
    ("language_adapters", "mixed", 3, Layout(), PP),
    ("qwen", "mixed", 3, Layout(ranks=2, **CP), {}),
    ("frozen", "mixed", 4, Layout(ranks=2, **SP), {}),
    ("tower_adapters", "mixed", 4, Layout(ranks=2), TP),
    ("language_adapters", "none", 3, Layout(ranks=2), {}),
    ("experts", "mixed", 6, Layout(ranks=2, **SP), {**SP, "expert_parallel": 2, "expert_tensor_parallel": 2}),
    ("experts", "one", 4, Layout(ranks=2), {"expert_parallel": 2}),
    ("radio", "mixed", 3, Layout(ranks=2), {}),
    ("llava", "many", 4, Layout(ranks=2), SP),
    ("llava", "many", 3, Layout(), PP),
    ("qwen", "huge", 3, Layout(ranks=2), {}),
    ("qwen", "huge", 4, Layout(ranks=2, **SP), CP),
    ("deep_qwen", "huge", 3, Layout(), VPP),
    ("gemma", "mixed", 3, Layout(ranks=2, **SP), {}),
    ("intern", "mixed", 3, Layout(ranks=2, **SP), {}),
    ("intern", "mixed", 3, Layout(ranks=2), {}),
    ("llava", "none", 4, Layout(ranks=2, **SP), {}),
    ("llava", "one", 4, Layout(ranks=2), {}),
    ("llava", "mixed", 4, Layout(ranks=2), TP),
    ("llava", "mixed", 3, Layout(), CP),
    ("onevision", "mixed", 4, Layout(ranks=2, **SP), {}),
    ("qwen3", "mixed", 3, Layout(), CP),
    ("qwen3", "none", 4, Layout(ranks=2), SP),
    ("deep_qwen3", "one", 3, Layout(), VPP),
    ("qwen", "none", 3, Layout(ranks=2), {}),
    ("qwen", "mixed", 3, Layout(), CP),
    ("qwen", "mixed", 4, Layout(ranks=2, **SP), CP),
    ("deep_qwen", "mixed", 4, Layout(ranks=2, **SP), PP),
    ("deep_qwen", "mixed", 4, Layout(ranks=2), VPP),
    ("qwen", "mixed", 8, Layout(ranks=4, **SP), SP),
]
COLOCATED = [
    ("deep", "mixed", 4, Layout(**CP), {**SP, **PP, **UNITS}),
    ("deep_qwen", "mixed", 4, Layout(**SP), {**VPP, **SHARDED}),
    ("llava", "none", 2, Layout(), {**PP, **GRADS}),
    ("experts", "mixed", 2, Layout(**SP), {"expert_parallel": 2}),
    ("qwen3", "mixed", 4, Layout(**SP), CP),
    ("llava_rows", "mixed", 2, Layout(), TP),
    ("tiles", "mixed", 2, Layout(), SP),
    ("experts", "mixed", 4, Layout(), {**SP, "expert_parallel": 2, "expert_tensor_parallel": 2}),
    ("deep", "mixed", 4, Layout(), {**PP, **SHARDED, "pipeline": PipelineOptions(schedule="zero_bubble")}),
    ("qwen", "mixed", 4, Layout(**CP), UNITS),
]
FULL_COLOCATED = [
    ("qwen", "mixed", 2, Layout(), SP),
    ("llava", "mixed", 2, Layout(**SP), {}),
    ("qwen", "mixed", 4, Layout(), SP),
    ("deep_qwen", "mixed", 2, Layout(), VPP),
    ("qwen", "mixed", 2, Layout(), CP),
    ("qwen3", "mixed", 2, Layout(), PP),
    ("both_adapters", "mixed", 2, Layout(), SP),
    ("experts", "mixed", 2, Layout(**TP), {"expert_parallel": 2}),
    ("qwen", "huge", 2, Layout(), SP),
    ("qwen", "huge", 4, Layout(), {**SP, **CP}),
    ("deep_qwen", "huge", 2, Layout(), VPP),
    ("llava", "many", 4, Layout(), PP),
    ("frozen", "mixed", 2, Layout(), SP),
    ("language_adapters", "mixed", 4, Layout(**TP), PP),
    ("tower_adapters", "one", 2, Layout(**SP), {}),
    ("qwen3", "one", 4, Layout(), SP),
    ("llava", "none", 2, Layout(), TP),
    ("llava", "one", 4, Layout(), TP),
    ("onevision", "mixed", 4, Layout(**SP), PP),
    ("qwen", "none", 2, Layout(), CP),
    ("qwen", "one", 4, Layout(**SP), {}),
    ("qwen", "mixed", 4, Layout(**TP), {**SP, **CP}),
    ("qwen", "mixed", 4, Layout(tensor_parallel=4, sequence_parallel=True), SP),
    ("deep_qwen", "mixed", 4, Layout(), {**SP, **PP}),
    ("deep_qwen", "none", 2, Layout(**SP), PP),
    ("deep", "mixed", 4, Layout(**TP), {"pipeline_parallel": 4}),
    ("deep", "one", 4, Layout(**SP), {**PP, **CP}),
    ("aligned", "mixed", 4, Layout(), SP),
]


def assert_same(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    gradients, final = ({k: v for rank in found for k, v in rank[what].items()} for what in ("gradients", "final"))
    for what in ("losses", "norms"):
        assert all(rank[what] == pytest.approx(expected[what], rel=1e-9) for rank in found)
    assert gradients.keys() == expected["gradients"].keys()
    assert_same_gradients(gradients, expected["gradients"])
    assert_same_gradients(final, expected["final"])


@pytest.mark.parametrize(
    "layout", [*DISJOINT, *(pytest.param(each, marks=pytest.mark.full) for each in FULL_DISJOINT)], ids=str
)
def test_disjoint_models_train_as_one_device(layout: Row) -> None:
    name, counts, ranks, tower, language = layout
    assert_same(run(train, ranks, name, counts, tower, language, "disjoint", timeout=240), by_hand(name, counts))


@pytest.mark.parametrize(
    "layout", [*COLOCATED, *(pytest.param(each, marks=pytest.mark.full) for each in FULL_COLOCATED)], ids=str
)
def test_colocated_models_train_as_one_device(layout: Row) -> None:
    name, counts, ranks, tower, language = layout
    assert_same(run(train, ranks, name, counts, tower, language, "colocated", timeout=240), by_hand(name, counts))


@pytest.mark.parametrize(
    "row",
    [
        (4, "experts", "mixed", Layout(ranks=2), {"expert_parallel": 2}, "disjoint"),
        (2, "llava", "mixed", Layout(), {}, "colocated"),
    ],
    ids=["disjoint", "colocated"],
)
def test_replicas_may_have_different_numbers_of_micro_batches(row: tuple[Any, ...]) -> None:
    ranks, name, counts, *others = row
    assert_same(run(train, ranks, name, counts, *others, True), by_hand(name, counts))


def _sharded(tower: Layout, language: dict[str, Any], placement: Any) -> tuple[set[str], float]:
    """Which parameters are shards on this rank, and the loss of a step."""
    options = DataParallelOptions(level="optim_grads_params", overlap_param_gather=False)
    made = make("qwen3", tower, {**language, "data_parallel": options}, placement=placement)
    assert made.engine.units is not None
    shards = made.engine.units.sharded
    rows = batch(COUNTS["mixed"][0], seed=0, config=CONFIGS["qwen3"]).split(2)
    loss = float(made.forward_backward(lambda replica: rows[replica].split(1)))
    return {name for name, parameter in made.model.root.named_parameters() if id(parameter) in shards}, loss


@pytest.mark.parametrize(
    ("tower", "language", "placement"),
    [(Layout(ranks=2), {}, "disjoint"), (Layout(), SP, "colocated"), (Layout(), PP, "colocated")],
    ids=["disjoint", "tensor", "pipeline"],
)
def test_each_model_shards_its_layers(tower: Layout, language: dict[str, Any], placement: str) -> None:
    found = run(_sharded, 4, tower, language, placement)
    towers = [{name.rpartition(".layers.")[0] for name in held if "tower" in name} for held, _ in found]
    assert towers == [{"embed.tower"} if placement == "colocated" or rank < 2 else set() for rank in range(4)]
    names = {name for held, _ in found for name in held if "tower" not in name}
    assert {name.partition(".")[0] for name in names} == {"embed", "layers", "head"}
    assert all(loss == pytest.approx(by_hand("qwen3", "mixed")["losses"][0], rel=1e-9) for _, loss in found)


def _late() -> int:
    """How often a step with two micro-batches waits for a layer of the tower that nobody has started to gather."""
    four = replace(CONFIGS["qwen"].vision, num_layers=4)
    with mock.patch.dict(CONFIGS, {"long": replace(CONFIGS["qwen"], vision=four)}):
        options = DataParallelOptions(level="optim_grads_params", overlap_param_gather=False, prefetch=1)
        made = make("long", Layout(), {**SP, "data_parallel": options})
    late, fetch, hold, holding = [0], Unsharder.prefetch, Unsharder.unshard, list[int]()
    assert made.engine.units is not None
    assert made.model.grafted is not None
    inside, units = set(made.model.grafted.root.modules()), made.engine.units
    tower = {unit for unit, module in zip(units._order, units.modules, strict=True) if module in inside}
    assert len(tower) == 4

    def fetched(self: Unsharder, unit: int) -> None:
        late[0] += bool(holding) and unit in tower and self._present[self.turn_of[unit]] != unit
        fetch(self, unit)

    def held(self: Unsharder, unit: int) -> None:
        holding.append(unit)
        hold(self, unit)
        holding.pop()

    rows = batch(COUNTS["mixed"][0], seed=0, config=CONFIGS["qwen"]).split(1)
    with mock.patch.object(Unsharder, "prefetch", fetched), mock.patch.object(Unsharder, "unshard", held):
        made.forward_backward(lambda replica: rows[:2])
    return late[0]


def test_the_next_pass_of_the_tower_is_prefetched() -> None:
    assert run(_late, 2) == [0, 0]


class Noted:
    """A bridge and an engine that note what a tower does."""

    units = None

    def __init__(self) -> None:
        self.notes = ""

    def backward(self) -> None:
        self.notes += "b"

    def finish_grad_sync(self) -> None:
        self.notes += "."

    def micro_batches(self, count: int, sync: bool) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("side", "order"),
    [
        # One micro-batch more than the language model begins before its first backward pass.
        (Layout(), "ffbfbfbfbb."),
        (Layout(ranks=2, pipeline_parallel=2), "fffbfbfbbb."),
    ],
    ids=["one stage", "two stages"],
)
def test_the_tower_works_ahead(side: Layout, order: str) -> None:
    noted = Noted()
    placement, model = mock.Mock(language=side.mesh(side.ranks, 1, 1)), nn.Linear(1, 1)
    runner = TowerRunner(CONFIGS["llava"], model, noted, placement, side)  # type: ignore[arg-type]

    def send(batch: str) -> None:
        noted.notes += batch

    with mock.patch.object(runner, "_send", send):
        runner.train("fffff", noted)  # type: ignore[arg-type]
    assert noted.notes == order


def test_images_are_divided_in_order_by_their_rows() -> None:
    assert consecutive((4, 4, 4, 4), 2) == [range(2), range(2, 4)]
    assert consecutive((24, 4, 4, 4), 2) == [range(1), range(1, 4)]
    assert consecutive((4, 4, 24), 3) == [range(2), range(2, 3), range(3, 3)]
    assert consecutive((), 2) == [range(0), range(0)]


def test_images_are_balanced_by_rows() -> None:
    assert balanced([[4, 4], [4, 4]], 2) == [[[0], [0]], [[1], [1]]]
    assert balanced([[24, 4], [8, 8]], 2) == [[[0], []], [[1], [0, 1]]]
    assert balanced([[], []], 2) == [[[], []], [[], []]]
    sizes = [[5, 9, 1, 7], [3, 3, 8]]
    loads = [sum(sizes[home][i] for home, own in enumerate(each) for i in own) for each in balanced(sizes, 3)]
    assert loads == [12, 12, 12]


@pytest.mark.parametrize(
    ("tower", "language", "options", "message"),
    [
        ({"ranks": 2}, {}, {}, "the tower has 2 ranks and the language model 1, which are 3, and there are 1"),
        ({"pipeline_parallel": 2}, {}, {}, "the tower has pipeline_parallel=2, virtual_pipeline=1"),
        ({"expert_parallel": 2}, {}, {}, "the tower has expert_parallel=2, expert_tensor_parallel=1; it has no"),
        ({"ranks": 2}, {}, {"placement": "colocated"}, "the tower has ranks=2, and there are 1 processes"),
        ({}, {"ranks": 3}, {"placement": "colocated"}, "the language model has ranks=3, and there are 1 processes"),
        ({}, {}, {"placement": "beside"}, "placement='beside'; choose one of colocated, disjoint"),
        ({}, {}, {"placement": "colocated", "freeze": ["*.towr.*"]}, "freeze has '*.towr.*', which matches no"),
    ],
    ids=str,
)
def test_what_cannot_be_raises(
    tower: dict[str, Any], language: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((LayoutError, ConfigurationError), match=re.escape(message)):
        make("llava", Layout(**tower), language, **{"placement": "disjoint", **options})


def test_a_replica_without_micro_batches_is_told() -> None:
    made = make("llava", Layout(), {})
    assert made.model.grafted is not None
    assert isinstance(VLM(CONFIGS["llava"]).without_tower(), type(made.model.grafted.root))
    with pytest.raises(DataError, match=r"replicas \[0\] have \[0\] micro-batches; give each as many"):
        made.forward_backward(lambda replica: [])
