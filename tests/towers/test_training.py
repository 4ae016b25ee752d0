"""A tower in a layout of its own and its language model train the same model as a single device by hand."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megalight.errors import ConfigurationError, DataError, LayoutError
from megalight.models.transforms import LoRA
from megalight.models.vlm import VLM
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.data_parallel.unshard import Unsharder
from megalight.parallel.layout import Layout
from megalight.towers import TowersTraining
from megalight.towers.disjoint import TowerRunner
from megalight.towers.features import balanced, consecutive
from tests.models.test_vlm_strategy import ADAPTERS, CONFIGS, COUNTS, FREEZE, by_hand, rows_of
from tests.models.vlm_samples import batch
from tests.parallel.gathering import gather_canonical
from tests.strategies.training import ADAM, CLIP, SEED, assert_same_gradients
from tests.support.workers import run


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    every = list(parameters)
    # As many groups on each stage of a pipeline.
    groups = [
        {"params": [p for p in every if p.ndim > 1], "weight_decay": ADAM.weight_decay},
        {"params": [p for p in every if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=ADAM.lr, betas=ADAM.betas, eps=ADAM.eps)


def make(name: str, tower: dict[str, Any], language: dict[str, Any], **options: Any) -> TowersTraining:
    adapters = (LoRA(rank=3, alpha=6.0, **ADAPTERS[name]),) if name in ADAPTERS else ()
    sharing = DataParallelOptions(level="no_shard", overlap_param_gather=False)
    return TowersTraining(
        CONFIGS[name],
        tower=Layout(**tower),
        language=Layout(**{"transforms": adapters, "data_parallel": sharing, **language}),
        optimizer=adam,
        seed=SEED,
        dtype=torch.float64,
        freeze=options.pop("freeze", FREEZE.get(name, ())),
        **options,
    )


def whole(made: TowersTraining, of: Callable[[nn.Parameter], torch.Tensor | None]) -> dict[str, Any]:
    """Whole tensors of this rank's models by canonical name."""
    found, model = {}, made.model
    held = {n: t.detach().clone() for n, p in model.root.named_parameters() if (t := of(p)) is not None}
    grafted = {} if model.grafted is None else model.grafted.specs
    for mesh, tower in ((made.placed.tower, True), (made.placed.mesh, False)):
        own = {n: t for n, t in held.items() if (n in grafted) == tower}
        found |= gather_canonical(own, model.specs, mesh, sum_partial=False) if own or not tower else {}
    return {key: value.numpy() for key, value in found.items()}


def train(
    name: str, counts: str, tower: dict[str, Any], language: dict[str, Any], placement: Any, uneven: bool = False
) -> dict[str, Any]:
    """All steps of :func:`by_hand`. Ranks tell what they hold.

    Args:
        uneven: later replicas have larger and fewer micro-batches. Otherwise these have one row.
    """
    made = make(name, tower, language, placement=placement)
    data = made.placed.language.dp
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step, each in enumerate(COUNTS[counts]):
        rows = rows_of(name, each, step)
        shares = rows.split(len(rows) // data)
        parts = [share.split(1 + number * uneven) for number, share in enumerate(shares)]
        found["losses"].append(float(made.forward_backward(parts.__getitem__)))
        if not step:
            found["gradients"] = whole(made, lambda parameter: parameter.grad)
        found["norms"].append(float(made.clip_grad_norm(CLIP)))
        made.optimizer.step()
    return {**found, "final": whole(made, lambda parameter: parameter)}


TP = {"tensor_parallel": 2}
SP = {**TP, "sequence_parallel": True}
PP, CP = {"pipeline_parallel": 2}, {"context_parallel": 2}
VPP = {**PP, "virtual_pipeline": 2}
DISJOINT = [
    ("llava", "mixed", {"ranks": 2, **TP}, {"ranks": 2}),
    ("qwen", "mixed", {"ranks": 2, **SP}, {"ranks": 2, **SP}),
    ("qwen", "mixed", {"ranks": 2}, {"ranks": 1}),
    ("deep_qwen", "one", {"ranks": 1}, {"ranks": 2, "pipeline_parallel": 2}),
    # Features of earlier layers of the tower, whose gradients come back too.
    ("qwen3", "mixed", {"ranks": 2, **SP}, {"ranks": 2, "pipeline_parallel": 2}),
    # Patterns of adapters match layers of both models, or of one: then nothing is trained on the tower's ranks.
    ("both_adapters", "mixed", {"ranks": 2, **SP}, {"ranks": 1}),
    ("language_adapters", "mixed", {"ranks": 1}, {"ranks": 2, "pipeline_parallel": 2}),
    # Ranks of the tower share the rows of each image.
    ("qwen", "mixed", {"ranks": 2, "context_parallel": 2}, {"ranks": 1}),
    # Experts exchange tokens between replicas, whose images one rank reads.
    ("experts", "mixed", {"ranks": 1}, {"ranks": 2, "expert_parallel": 2}),
    # A layout of two chunks per rank: the first one begins four micro-batches before a gradient returns.
    ("deep_qwen", "mixed", {"ranks": 1}, {"ranks": 2, "pipeline_parallel": 2, "pipeline_layout": "Et|t|t|tL"}),
]
FULL_DISJOINT = [
    ("frozen", "mixed", {"ranks": 2, **SP}, {"ranks": 2}),
    ("tower_adapters", "mixed", {"ranks": 2}, {"ranks": 2, **TP}),
    ("language_adapters", "none", {"ranks": 2}, {"ranks": 1}),
    ("experts", "mixed", {"ranks": 2, **SP}, {"ranks": 4, **SP, "expert_parallel": 2, "expert_tensor_parallel": 2}),
    ("experts", "one", {"ranks": 2}, {"ranks": 2, "expert_parallel": 2}),
    ("radio", "mixed", {"ranks": 2}, {"ranks": 1}),
    ("llava", "many", {"ranks": 2}, {"ranks": 2, **SP}),
    ("llava", "many", {"ranks": 1}, {"ranks": 2, "pipeline_parallel": 2}),
    ("qwen", "huge", {"ranks": 2}, {"ranks": 1}),
    ("qwen", "huge", {"ranks": 2, **SP}, {"ranks": 2, "context_parallel": 2}),
    ("deep_qwen", "huge", {"ranks": 1}, {"ranks": 2, "pipeline_parallel": 2, "virtual_pipeline": 2}),
    ("gemma", "mixed", {"ranks": 2, **SP}, {"ranks": 1}),
    ("intern", "mixed", {"ranks": 2, **SP}, {"ranks": 1}),
    ("intern", "mixed", {"ranks": 2}, {"ranks": 1}),
    ("llava", "none", {"ranks": 2, **SP}, {"ranks": 2}),
    ("llava", "one", {"ranks": 2}, {"ranks": 2}),
    ("llava", "mixed", {"ranks": 2}, {"ranks": 2, **TP}),
    ("llava", "mixed", {"ranks": 1}, {"ranks": 2, "context_parallel": 2}),
    ("onevision", "mixed", {"ranks": 2, **SP}, {"ranks": 2}),
    ("qwen3", "mixed", {"ranks": 1}, {"ranks": 2, "context_parallel": 2}),
    ("qwen3", "none", {"ranks": 2}, {"ranks": 2, **SP}),
    ("deep_qwen3", "one", {"ranks": 1}, {"ranks": 2, "pipeline_parallel": 2, "virtual_pipeline": 2}),
    ("qwen", "none", {"ranks": 2}, {"ranks": 1}),
    ("qwen", "mixed", {"ranks": 1}, {"ranks": 2}),
    ("qwen", "mixed", {"ranks": 1}, {"ranks": 2, "context_parallel": 2}),
    ("qwen", "mixed", {"ranks": 2, **SP}, {"ranks": 2, "context_parallel": 2}),
    ("deep_qwen", "mixed", {"ranks": 2, **SP}, {"ranks": 2, "pipeline_parallel": 2}),
    ("deep_qwen", "mixed", {"ranks": 2}, {"ranks": 2, "pipeline_parallel": 2, "virtual_pipeline": 2}),
    ("qwen", "mixed", {"ranks": 4, **SP}, {"ranks": 4, **SP}),
]
COLOCATED = [
    # Model, images of rows, ranks, layout of the tower, layout of the language model.
    ("qwen", "mixed", 2, {}, SP),
    ("llava", "mixed", 2, SP, {}),
    ("qwen", "mixed", 4, {}, SP),
    ("deep_qwen", "mixed", 2, {}, VPP),
    ("qwen", "mixed", 2, {}, CP),
    ("qwen3", "mixed", 2, {}, PP),
    ("both_adapters", "mixed", 2, {}, SP),
    ("experts", "mixed", 2, TP, {"expert_parallel": 2}),
    ("llava_rows", "mixed", 2, {}, TP),
]
FULL_COLOCATED = [
    ("qwen3", "mixed", 4, SP, CP),
    ("qwen", "huge", 2, {}, SP),
    ("qwen", "huge", 4, {}, {**SP, **CP}),
    ("deep_qwen", "huge", 2, {}, VPP),
    ("llava", "many", 4, {}, PP),
    ("frozen", "mixed", 2, {}, SP),
    ("language_adapters", "mixed", 4, TP, PP),
    ("tower_adapters", "one", 2, SP, {}),
    ("experts", "mixed", 4, {}, {**SP, "expert_parallel": 2, "expert_tensor_parallel": 2}),
    ("qwen3", "one", 4, {}, SP),
    ("llava", "none", 2, {}, TP),
    ("llava", "one", 4, {}, TP),
    ("onevision", "mixed", 4, SP, PP),
    ("qwen", "none", 2, {}, CP),
    ("qwen", "one", 4, SP, {}),
    ("qwen", "mixed", 4, TP, {**CP, **SP}),
    ("qwen", "mixed", 4, {**SP, "tensor_parallel": 4}, SP),
    ("deep_qwen", "mixed", 4, {}, {**SP, **PP}),
    ("deep_qwen", "none", 2, SP, PP),
    ("deep", "mixed", 4, TP, {"pipeline_parallel": 4}),
    ("deep", "one", 4, SP, {**PP, **CP}),
    ("aligned", "mixed", 4, {}, SP),
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
def test_disjoint_models_train_as_one_device(layout: tuple[str, str, dict[str, Any], dict[str, Any]]) -> None:
    name, counts, tower, language = layout
    found = run(train, tower["ranks"] + language["ranks"], *layout, "disjoint", timeout=240)
    assert_same(found, by_hand(name, counts))


@pytest.mark.parametrize(
    "layout", [*COLOCATED, *(pytest.param(each, marks=pytest.mark.full) for each in FULL_COLOCATED)], ids=str
)
def test_colocated_models_train_as_one_device(layout: tuple[str, str, int, dict[str, Any], dict[str, Any]]) -> None:
    name, counts, ranks, tower, language = layout
    assert_same(run(train, ranks, name, counts, tower, language, "colocated", timeout=240), by_hand(name, counts))


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (4, ("experts", "mixed", {"ranks": 2}, {"ranks": 2, "expert_parallel": 2}, "disjoint")),
        (2, ("llava", "mixed", {}, {}, "colocated")),
    ],
    ids=["disjoint", "colocated"],
)
def test_replicas_may_have_different_numbers_of_micro_batches(ranks: int, layout: tuple[Any, ...]) -> None:
    assert_same(run(train, ranks, *layout, True), by_hand(*layout[:2]))


def _sharded(tower: dict[str, Any], language: dict[str, Any], placement: Any) -> tuple[set[str], float]:
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
    [({"ranks": 2}, {"ranks": 2}, "disjoint"), ({}, SP, "colocated"), ({}, PP, "colocated")],
    ids=["disjoint", "tensor", "pipeline"],
)
def test_each_model_shards_its_layers(tower: dict[str, Any], language: dict[str, Any], placement: str) -> None:
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
        made = make("long", {}, {**SP, "data_parallel": options})
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
        make("llava", tower, language, **{"placement": "disjoint", **options})


def test_a_replica_without_micro_batches_is_told() -> None:
    made = make("llava", {}, {})
    assert made.model.grafted is not None
    assert isinstance(VLM(CONFIGS["llava"]).without_tower(), type(made.model.grafted.root))
    with pytest.raises(DataError, match=r"replicas \[0\] have \[0\] micro-batches; give each as many"):
        made.forward_backward(lambda replica: [])
