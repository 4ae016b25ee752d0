"""Towers with layouts of their own on the same ranks train the same model as one device by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megalight.errors import ConfigurationError, DataError, LayoutError
from megalight.models.vlm import VLM
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.data_parallel.unshard import Unsharder
from megalight.parallel.layout import Layout
from megalight.towers import TowersBeside
from megalight.towers.batch_split import balanced
from tests.models.test_vlm_strategy import CONFIGS, COUNTS, by_hand, rows_of
from tests.models.vlm_samples import batch
from tests.parallel.gathering import gather_canonical
from tests.strategies.training import CLIP, SEED, assert_same_gradients
from tests.support.workers import run
from tests.towers.test_apart import adam, of_case

TP = {"tensor_parallel": 2}
SP = {**TP, "sequence_parallel": True}
PP, CP = {"pipeline_parallel": 2}, {"context_parallel": 2}
VPP = {**PP, "virtual_pipeline": 2}


def make(name: str, tower: dict[str, Any], language: dict[str, Any], **options: Any) -> TowersBeside:
    world = dist.get_world_size()
    return TowersBeside(
        CONFIGS[name],
        tower=Layout(**{"ranks": world, **tower}),
        language=Layout(**{"ranks": world, **language}),
        optimizer=adam,
        seed=SEED,
        dtype=torch.float64,
        **{**of_case(name), **options},
    )


def whole(made: TowersBeside, gradients: bool = False) -> dict[str, Any]:
    """Whole tensors of both models by canonical name."""
    found = {}
    for model in (made.tower, made.language):
        named = {n: p.grad if gradients else p.detach() for n, p in model.root.named_parameters()}
        held = {n: t.clone() for n, t in named.items() if t is not None}
        found |= gather_canonical(held, model.specs, model.mesh, sum_partial=False)
    return {key: value.numpy() for key, value in found.items()}


def train(name: str, counts: str, tower: dict[str, Any], language: dict[str, Any]) -> dict[str, Any]:
    made = make(name, tower, language)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step, each in enumerate(COUNTS[counts]):
        every = rows_of(name, each, step)
        share = every.split(len(every) // made.language.mesh.dp)[made.replica]
        found["losses"].append(float(made.forward_backward(share.split(1))))  # type: ignore[arg-type]
        if not step:
            found["gradients"] = whole(made, gradients=True)
        found["norms"].append(float(made.clip_grad_norm(CLIP)))
        made.step()
    return {**found, "final": whole(made)}


CHOSEN = [
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
FULL = [
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


@pytest.mark.parametrize("layout", [*CHOSEN, *(pytest.param(each, marks=pytest.mark.full) for each in FULL)], ids=str)
def test_both_layouts_train_the_model_of_one_device(
    layout: tuple[str, str, int, dict[str, Any], dict[str, Any]],
) -> None:
    name, counts, ranks, tower, language = layout
    expected = by_hand(name, counts)
    found = run(train, ranks, name, counts, tower, language, timeout=240)
    gradients, final = ({k: v for rank in found for k, v in rank[what].items()} for what in ("gradients", "final"))
    for what in ("losses", "norms"):
        assert all(rank[what] == pytest.approx(expected[what], rel=1e-9) for rank in found)
    assert gradients.keys() == expected["gradients"].keys()
    assert_same_gradients(gradients, expected["gradients"])
    assert_same_gradients(final, expected["final"])


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
        ({"ranks": 2}, {}, {}, "the tower has 2 ranks, and there are 1 processes"),
        ({}, {"ranks": 3}, {}, "the language model has 3 ranks, and there are 1 processes"),
        ({"pipeline_parallel": 2}, {}, {}, "the tower has pipeline_parallel=2"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(
    tower: dict[str, Any], language: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    sides = {"tower": Layout(**tower), "language": Layout(**language)}
    with pytest.raises((LayoutError, ConfigurationError), match=message):
        TowersBeside(CONFIGS["llava"], optimizer=adam, **sides, **options)


def _sharded(language: dict[str, Any]) -> tuple[set[str], float]:
    """Which parameters are shards on this rank, and the loss of a step."""
    options = DataParallelOptions(level="optim_grads_params", overlap_param_gather=False)
    made = make("qwen3", {}, language, data_parallel=options)
    assert made.engine.units is not None
    shards = made.engine.units.sharded
    named = [*made.tower.root.named_parameters(), *made.language.root.named_parameters()]
    rows = batch(COUNTS["mixed"][0], seed=0, config=CONFIGS["qwen3"]).split(2)[made.replica]
    loss = float(made.forward_backward(rows.split(1)))  # type: ignore[arg-type]
    return {name for name, parameter in named if id(parameter) in shards}, loss


@pytest.mark.parametrize("language", [SP, PP], ids=str)
def test_each_model_shards_its_layers(language: dict[str, Any]) -> None:
    found = run(_sharded, 4, language)
    names = {name for held, _ in found for name in held if "tower" not in name}
    assert {name.partition(".")[0] for name in names} == {"embed", "layers", "head"}
    for held, loss in found:
        assert {name.rpartition(".layers.")[0] for name in held if "tower" in name} == {"embed.tower"}
        assert loss == pytest.approx(by_hand("qwen3", "mixed")["losses"][0], rel=1e-9)


def _late() -> int:
    """How often a step with two micro-batches waits for a layer of the tower that nobody has begun to gather."""
    four = replace(CONFIGS["qwen"].vision, num_layers=4)
    with mock.patch.dict(CONFIGS, {"long": replace(CONFIGS["qwen"], vision=four)}):
        options = DataParallelOptions(level="optim_grads_params", overlap_param_gather=False, prefetch=1)
        made = make("long", {}, SP, data_parallel=options)
    late, fetch, hold, holding = [0], Unsharder.prefetch, Unsharder.unshard, list[int]()
    assert made.engine.units is not None
    inside, units = set(made.tower.root.modules()), made.engine.units
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
        made.forward_backward(rows[:2])  # type: ignore[arg-type]
    return late[0]


def test_the_next_pass_of_the_tower_is_prefetched() -> None:
    assert run(_late, 2) == [0, 0]


def test_a_replica_without_micro_batches_is_told() -> None:
    made = TowersBeside(CONFIGS["llava"], tower=Layout(), language=Layout(), optimizer=adam)
    assert isinstance(VLM(CONFIGS["llava"]).without_tower(), type(made.tower.root))
    with pytest.raises(DataError, match="there are no micro-batches"):
        made.forward_backward([])


def _uneven() -> str:
    made = make("llava", {}, {})
    try:
        made.forward_backward(batch((1, 0)).split(1 + made.replica))  # type: ignore[arg-type]
    except DataError as error:
        return str(error)
    return ""


def test_replicas_have_as_many_micro_batches() -> None:
    assert all("replicas of the language model have [1, 2] micro-batches" in found for found in run(_uneven, 2))
