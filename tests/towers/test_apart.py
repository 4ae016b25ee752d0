"""Towers on ranks of their own train the same model as one device by hand."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalight.errors import ConfigurationError, DataError, LayoutError
from megalight.models.transforms import LoRA
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.layout import Layout
from megalight.towers import TowersApart
from megalight.towers.batch_split import consecutive
from megalight.towers.disjoint import TowerRunner
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


def make(name: str, tower: dict[str, Any], language: dict[str, Any], **options: Any) -> TowersApart:
    return TowersApart(
        CONFIGS[name],
        tower=Layout(**tower),
        language=Layout(**language),
        optimizer=adam,
        seed=SEED,
        dtype=torch.float64,
        **{**of_case(name), **options},
    )


def of_case(name: str) -> dict[str, Any]:
    """What a case has beside its model: frozen parameters and adapters."""
    adapters = [LoRA(rank=3, alpha=6.0, **ADAPTERS[name])] if name in ADAPTERS else []
    sharing = DataParallelOptions(level="no_shard", overlap_param_gather=False)
    return {"freeze": FREEZE.get(name, ()), "transforms": adapters, "data_parallel": sharing}


def numpy_of(tensors: dict[str, torch.Tensor], made: TowersApart) -> dict[str, Any]:
    """Whole tensors of this rank's side by canonical name, without what their names begin with."""
    whole = gather_canonical(tensors, made.model.specs, made.mesh, sum_partial=False)
    return {key: value.numpy() for key, value in whole.items()}


def train(
    name: str, counts: str, tower: dict[str, Any], language: dict[str, Any], uneven: bool = False
) -> dict[str, Any]:
    """All steps of :func:`by_hand`. Ranks of both sides tell what they hold.

    Args:
        uneven: later replicas have larger and fewer micro-batches. Otherwise these have one row.
    """
    made = make(name, tower, language)
    data = made.bridge.dest_mesh.dp
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step, each in enumerate(COUNTS[counts]):
        whole = rows_of(name, each, step)
        shares = whole.split(len(whole) // data)
        parts = [share.split(1 + number * uneven) for number, share in enumerate(shares)]
        found["losses"].append(float(made.forward_backward(parts.__getitem__)))
        if not step:
            gradients = {n: p.grad.clone() for n, p in made.model.root.named_parameters() if p.grad is not None}
            found["gradients"] = numpy_of(gradients, made)
        found["norms"].append(float(made.clip_grad_norm(CLIP)))
        made.step()
    weights = {n: p.detach() for n, p in made.model.root.named_parameters()}
    found["final"] = numpy_of(weights, made)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return {
        "losses": [rank["losses"] for rank in everyone],
        "norms": [rank["norms"] for rank in everyone],
        "gradients": {key: value for rank in everyone for key, value in rank["gradients"].items()},
        "final": {key: value for rank in everyone for key, value in rank["final"].items()},
    }


TP = {"tensor_parallel": 2}
SP = {**TP, "sequence_parallel": True}
CHOSEN = [
    ("llava", "mixed", {"ranks": 2, **TP}, {"ranks": 2}),
    ("qwen", "mixed", {"ranks": 2, **SP}, {"ranks": 2, **SP}),
    ("qwen", "mixed", {"ranks": 2}, {"ranks": 1}),
    ("deep_qwen", "one", {"ranks": 1}, {"ranks": 2, "pipeline_parallel": 2}),
    # Features of earlier layers of the tower, whose gradients come back too.
    ("qwen3", "mixed", {"ranks": 2, **SP}, {"ranks": 2, "pipeline_parallel": 2}),
    # Patterns of adapters match layers of both sides, or of one: then nothing is trained on the tower's ranks.
    ("both_adapters", "mixed", {"ranks": 2, **SP}, {"ranks": 1}),
    ("language_adapters", "mixed", {"ranks": 1}, {"ranks": 2, "pipeline_parallel": 2}),
    # Ranks of the tower share the rows of each image.
    ("qwen", "mixed", {"ranks": 2, "context_parallel": 2}, {"ranks": 1}),
    # Experts exchange tokens between replicas, whose images one rank reads.
    ("experts", "mixed", {"ranks": 1}, {"ranks": 2, "expert_parallel": 2}),
    # A layout of two chunks per rank: the first one begins four micro-batches before a gradient returns.
    ("deep_qwen", "mixed", {"ranks": 1}, {"ranks": 2, "pipeline_parallel": 2, "pipeline_layout": "Et|t|t|tL"}),
]
FULL = [
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


@pytest.mark.parametrize("layout", [*CHOSEN, *(pytest.param(each, marks=pytest.mark.full) for each in FULL)], ids=str)
def test_both_sides_train_the_model_of_one_device(layout: tuple[str, str, dict[str, Any], dict[str, Any]]) -> None:
    name, counts, tower, language = layout
    assert_same(run(train, tower["ranks"] + language["ranks"], *layout, timeout=240)[0], by_hand(name, counts))


def test_lanes_whose_experts_meet_may_have_different_numbers_of_micro_batches() -> None:
    layout = "experts", "mixed", {"ranks": 2}, {"ranks": 2, "expert_parallel": 2}
    assert_same(run(train, 4, *layout, True)[0], by_hand("experts", "mixed"))


def _sharded() -> tuple[set[str], float]:
    """Which parameters of this rank's side are shards, and the loss of a step."""
    options = DataParallelOptions(level="optim_grads_params", overlap_param_gather=False)
    made = make("qwen3", {"ranks": 2}, {"ranks": 2}, data_parallel=options)
    assert made.engine.units is not None
    shards = made.engine.units.sharded
    rows = batch(COUNTS["mixed"][0], seed=0, config=CONFIGS["qwen3"]).split(2)
    loss = float(made.forward_backward(lambda replica: rows[replica].split(1)))
    return {name for name, parameter in made.model.root.named_parameters() if id(parameter) in shards}, loss


def test_each_side_shards_its_layers() -> None:
    (tower, loss), _, (language, _), _ = run(_sharded, 4)
    assert {name.rpartition(".layers.")[0] for name in tower} == {"embed.tower"}
    assert {name.partition(".")[0] for name in language} == {"embed", "layers", "head"}
    assert loss == pytest.approx(by_hand("qwen3", "mixed")["losses"][0], rel=1e-9)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for what in ("losses", "norms"):
        assert all(rank == pytest.approx(expected[what], rel=1e-9) for rank in found[what])
    assert found["gradients"].keys() == expected["gradients"].keys()
    assert_same_gradients(found["gradients"], expected["gradients"])
    assert_same_gradients(found["final"], expected["final"])


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
    division, model = mock.Mock(language=side.mesh(side.ranks, 1, 1)), nn.Linear(1, 1)
    encoder = TowerRunner(CONFIGS["llava"], model, noted, division, side)  # type: ignore[arg-type]

    def send(batch: str) -> None:
        noted.notes += batch

    with mock.patch.object(encoder, "_send", send):
        encoder.train("fffff", noted)  # type: ignore[arg-type]
    assert noted.notes == order


def test_images_are_divided_in_order_by_their_rows() -> None:
    assert consecutive((4, 4, 4, 4), 2) == [range(2), range(2, 4)]
    assert consecutive((24, 4, 4, 4), 2) == [range(1), range(1, 4)]
    assert consecutive((4, 4, 24), 3) == [range(2), range(2, 3), range(3, 3)]
    assert consecutive((), 2) == [range(0), range(0)]


def _refused(tower: dict[str, Any], language: dict[str, Any], options: dict[str, Any]) -> str:
    try:
        make("llava", tower, language, **options)
    except (LayoutError, ConfigurationError) as error:
        return f"{error}"
    return ""


@pytest.mark.parametrize(
    ("tower", "language", "options", "message"),
    [
        (
            {"ranks": 2},
            {"ranks": 1},
            {},
            "the tower has 2 ranks and the language model 1, which are 3, and there are 2",
        ),
        ({"pipeline_parallel": 2}, {}, {}, "the tower has pipeline_parallel=2, virtual_pipeline=1"),
        (
            {"expert_parallel": 2},
            {},
            {},
            "the tower has expert_parallel=2, expert_tensor_parallel=1; it has no experts",
        ),
        ({}, {}, {"freeze": ["*.towr.*"]}, "freeze has '*.towr.*', which matches no parameter"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(
    tower: dict[str, Any], language: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    assert all(re.search(re.escape(message), found) for found in run(_refused, 2, tower, language, options))


def _uneven() -> str:
    made = make("llava", {}, {})
    with pytest.raises(DataError) as error:
        made.forward_backward(lambda replica: [])
    return str(error.value)


def test_micro_batches_must_be_as_many() -> None:
    assert all("replicas [0] have [0] micro-batches; give each as many" in found for found in run(_uneven, 2))


def _odd_degrees() -> str:
    return _refused({"ranks": 2}, {"ranks": 3}, {})


@pytest.mark.full
def test_degrees_that_do_not_divide_are_refused() -> None:
    message = "the tower has 2 replicas and the language model 3; one must divide the other"
    assert all(message in found for found in run(_odd_degrees, 5))
