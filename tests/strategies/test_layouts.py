"""The table of layouts: every way of cutting model and tokens trains the same model as one device."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest

from megalight.models.gpt import AttentionConfig
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.pipeline.layout import parse
from megalight.parallel.recompute import RecomputeOptions
from megalight.parallel.tensor.overlap.spec import TensorOptions
from megalight.strategies import PipelineOptions
from tests.strategies.training import CONFIGS, Gradients, assert_same_gradients, assert_same_run, by_hand, fit
from tests.support.workers import run

MODELS = {
    **CONFIGS,
    "window": replace(CONFIGS["mha"], attention=AttentionConfig(window=3)),
    "tied window": replace(CONFIGS["tied"], attention=AttentionConfig(window=3, qk_norm=True)),
}


@dataclass(frozen=True)
class Row:
    """One layout of the table."""

    config: str = "gqa"
    layers: int = 4
    pp: int = 1
    vpp: int = 1
    tp: int = 1
    sp: bool = False
    cp: int = 1
    kind: str = "auto"
    inner: int | None = None
    dp: int = 1
    text: str | None = None
    level: str = "optim"
    packed: bool = False
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    recompute: RecomputeOptions = field(default_factory=RecomputeOptions)
    tensor: TensorOptions = field(default_factory=TensorOptions)

    @property
    def world(self) -> int:
        return self.pp * self.tp * self.cp * self.dp

    def __str__(self) -> str:
        parts = [self.config]
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if value != each.default and each.default_factory is not type(value):
                parts.append(each.name if value is True else f"{each.name}{value}")
        for options in (self.pipeline, self.recompute, self.tensor):
            default = type(options)()
            parts += [f"{k}={v}" for k, v in vars(options).items() if v and v != getattr(default, k)]
        return "-".join(parts)


PIECES = TensorOptions(overlap="pipelined", pieces=2)
ZERO_BUBBLE = PipelineOptions(schedule="zero_bubble")
WHOLE = RecomputeOptions(granularity="full", num_layers=1)
GROUPS = RecomputeOptions(granularity="full", method="uniform", num_layers=2)
SOME = RecomputeOptions(granularity="full", method="block", num_layers=1)
NORMS = RecomputeOptions(granularity="selective", modules=("attention_norm", "mlp_norm", "mlp.act", "attention.inner"))

COVER = [
    Row("gpt2", pp=2, vpp=2, packed=True),
    Row("gqa", pp=3, text="E|t*3|tL"),
    Row("gqa", 7, pp=4, pipeline=PipelineOptions(count_loss=True)),
    Row(
        "tied window",
        6,
        pp=2,
        dp=2,
        text="Et|t*3|t|tL",
        level="no_shard",
        packed=True,
        pipeline=ZERO_BUBBLE,
        recompute=NORMS,
    ),
    Row("gpt2", 5, pp=2, tp=2, sp=True, text="Et|t|tt|tL", pipeline=ZERO_BUBBLE, recompute=SOME, tensor=PIECES),
    Row("gqa", 5, pp=2, cp=2, pipeline=PipelineOptions(schedule="zero_bubble", first_layers=2), packed=True),
    Row("mha", 5, pp=2, cp=2, kind="ring", text="E|tt|tt|tL", level="no_shard", pipeline=ZERO_BUBBLE, recompute=SOME),
    Row("tied", 5, pp=2, cp=2, kind="all_gather", text="Et|t|tt|tL", pipeline=ZERO_BUBBLE, recompute=NORMS),
    Row("tied", 5, pp=2, cp=2, kind="all_to_all", text="Et|ttt|t|L", pipeline=ZERO_BUBBLE, recompute=SOME),
    Row("gpt2", 2, tp=2, dp=2, packed=True, recompute=WHOLE, tensor=PIECES),
    Row("mha", 2, tp=2, sp=True, dp=2, recompute=NORMS),
    Row("gqa", 2, tp=2, sp=True, cp=2, kind="ring", recompute=NORMS, tensor=PIECES),
    Row(
        "window",
        2,
        tp=2,
        sp=True,
        cp=2,
        kind="all_to_all",
        level="no_shard",
        packed=True,
        recompute=NORMS,
        tensor=PIECES,
    ),
    Row(
        "window",
        2,
        tp=2,
        sp=True,
        cp=2,
        kind="all_gather",
        level="no_shard",
        packed=True,
        recompute=WHOLE,
        tensor=PIECES,
    ),
    Row("gqa", 2, cp=2, kind="ring", dp=2, recompute=NORMS),
    Row("mha", 2, cp=2, kind="all_to_all", dp=2),
    Row("gqa", 2, cp=2, kind="all_gather", dp=2, recompute=SOME),
    Row("gpt2", 2, cp=4, kind="ring", packed=True),
    Row("mha", 2, cp=4, kind="all_to_all_ring", inner=2, level="no_shard", packed=True, recompute=NORMS),
    Row("tied", 2, cp=4, kind="all_to_all_ring", inner=2, recompute=WHOLE),
]
"""Every pair of features that four ranks have room for."""

WIDE = [
    Row("gqa", pp=2),
    Row("tied", pp=4, packed=True, recompute=WHOLE),
    Row("mha", 6, pp=2, vpp=3, pipeline=PipelineOptions(group_size=3), recompute=SOME),
    Row("gqa", pp=2, tp=2, sp=True, recompute=GROUPS),
    Row("gqa", 8, pp=4, vpp=2),
    Row("tied", 8, pp=4, vpp=2, pipeline=ZERO_BUBBLE),
    Row("mha", 8, pp=2, vpp=4, packed=True),
    Row("gqa", 6, pp=2, vpp=3, pipeline=ZERO_BUBBLE, recompute=NORMS),
    Row("gpt2", 6, pp=2, vpp=3, dp=2),
    Row("gqa", pp=4, dp=2, recompute=WHOLE, pipeline=PipelineOptions(first_layers=1)),
    Row("tied", pp=4, tp=2, sp=True),
    Row("gqa", 8, pp=2, vpp=2, tp=2, sp=True, recompute=SOME),
    Row("tied", 8, pp=2, vpp=2, tp=2, level="no_shard"),
    Row("mha", pp=2, tp=2, dp=2, sp=True, packed=True),
    Row("gpt2", pp=2, tp=4, sp=True),
    Row("gqa", 4, pp=2, cp=2, dp=2, kind="ring", packed=True),
    Row("tied", 4, pp=2, cp=2, tp=2, sp=True, kind="all_gather"),
    Row("tied", 4, pp=2, vpp=2, cp=2, kind="all_to_all"),
    Row("gqa", 8, pp=4, vpp=2, cp=2, kind="ring", recompute=WHOLE),
    Row("mha", 5, pp=2, cp=4, kind="all_to_all_ring", inner=2, text="Et|t|tt|tL", pipeline=ZERO_BUBBLE, packed=True),
    Row("gqa", 2, cp=4, kind="all_to_all_ring", inner=2, tp=2, sp=True, tensor=PIECES),
    Row("tied", 2, cp=4, kind="all_to_all_ring", inner=2, dp=2),
    Row("gqa", 2, cp=4, kind="ring", tp=2, sp=True),
    Row("gqa", 2, cp=4, kind="all_gather", packed=True),
    Row("gqa", 2, cp=4, kind="all_to_all"),
    Row("mha", 2, cp=4, kind="all_to_all", dp=2),
    Row("tied", 2, cp=2, kind="ring", tp=4, level="no_shard", packed=False),
    Row("gpt2", 2, cp=2, kind="all_to_all", tp=2, packed=True),
    Row("window", 2, cp=4, kind="all_to_all", packed=True),
    Row("window", 2, cp=2, tp=2, sp=True, kind="all_gather"),
    Row("window", 4, cp=2, pp=2, kind="auto", recompute=NORMS),
    Row("mha", 2, cp=2, dp=2, kind="ring", level="no_shard"),
    Row("gpt2", 2, tp=4, sp=True, dp=2, tensor=PIECES, recompute=WHOLE),
    Row("gqa", 5, pp=3, text="Et|(t|)*1t*3L"),
    Row("tied", 6, pp=2, text="E|tt|t*3|tL"),
    Row("gqa", 5, pp=4, text="E|t*2||t*3L", dp=2),
]
"""Other values of features, eight ranks, longer pipelines, and pairs that four ranks have no room for."""

KINDS = ("all_to_all", "ring", "all_gather", "all_to_all_ring")
BESIDE_TWO_LEVELS = ("pp", "vpp", "uneven", "zero bubble", "tp", "sp", "overlap", "dp")
APART = {
    "a layer has one kind of attention": set(itertools.combinations(KINDS, 2)),
    "a run has one granularity of recompute": {("full", "selective")},
    "rings have no window": {("ring", "window"), ("all_to_all_ring", "window")},
}
"""Pairs of features that no layout can have, by reason."""
NARROW = {"two levels alone take four ranks": {("all_to_all_ring", feature) for feature in BESIDE_TWO_LEVELS}}
"""Pairs that no layout of four ranks can have."""


def features(row: Row) -> dict[str, bool]:
    """What may go wrong together with something else."""
    model, pipeline = MODELS[row.config], row.pipeline
    return {
        "pp": row.pp > 1,
        "vpp": (len(parse(row.text)) if row.text else row.pp * row.vpp) > row.pp,
        "uneven": row.text is not None or pipeline.first_layers is not None or pipeline.count_loss,
        "zero bubble": pipeline.schedule == "zero_bubble",
        "tp": row.tp > 1,
        "sp": row.sp,
        "overlap": row.tensor.overlap != "auto",
        **{kind: row.cp > 1 and row.kind == kind for kind in KINDS},
        "dp": row.dp > 1,
        "no_shard": row.level == "no_shard" and row.dp * row.cp > 1,
        "packed": row.packed,
        "tied": model.tie_embeddings,
        "window": model.attention.window is not None,
        "full": row.recompute.granularity == "full",
        "selective": row.recompute.granularity == "selective",
    }


@pytest.mark.parametrize(
    ("rows", "ranks", "apart"), [(COVER, 4, APART | NARROW), (COVER + WIDE, 8, APART)], ids=["cover", "all"]
)
def test_every_pair_of_features_meets(rows: list[Row], ranks: int, apart: dict[str, set[tuple[str, str]]]) -> None:
    assert max(row.world for row in rows) == ranks
    every = {frozenset(pair) for pair in itertools.combinations(features(rows[0]), 2)}
    impossible = {frozenset(pair) for pairs in apart.values() for pair in pairs}
    assert impossible <= every
    met = {
        frozenset(pair)
        for row in rows
        for pair in itertools.combinations([name for name, has in features(row).items() if has], 2)
    }
    missing = every - impossible - met
    assert not missing, f"no row has {sorted(sorted(pair) for pair in missing)}"
    assert not met & impossible, f"possible after all: {sorted(sorted(pair) for pair in met & impossible)}"


def test_the_table_has_forty_different_rows() -> None:
    assert len({str(row) for row in COVER + WIDE}) == len(COVER + WIDE) >= 40


@functools.cache
def expected(name: str, layers: int, packed: bool) -> dict[str, Any]:
    return by_hand(replace(MODELS[name], num_layers=layers), packed=packed)


def options_of(row: Row) -> dict[str, Any]:
    """The row as arguments of the strategy."""
    return {
        "micro_batch_size": 1,
        "tensor_parallel": row.tp,
        "sequence_parallel": row.sp,
        "context_parallel": row.cp,
        "context": ContextOptions(row.kind, row.inner),
        "pipeline_parallel": row.pp,
        "virtual_pipeline": row.vpp,
        "pipeline_layout": row.text,
        "pipeline": row.pipeline,
        "recompute": row.recompute,
        "tensor": row.tensor,
    }


def _rank(row: Row) -> dict[str, Any]:
    model, gradients = replace(MODELS[row.config], num_layers=row.layers), Gradients()
    found = fit(model, options={"level": row.level}, packed=row.packed, extra_callbacks=[gradients], **options_of(row))
    return {**found, "gradients": gradients.first}


def check(row: Row) -> None:
    found = run(_rank, row.world, row, timeout=120)
    for rank in found:
        assert rank["losses"] == found[0]["losses"], "ranks report different losses"
    wanted = expected(row.config, row.layers, row.packed)
    assert_same_gradients(found[0]["gradients"], wanted["gradients"])
    assert_same_run(found[0], wanted)


@pytest.mark.parametrize("row", COVER, ids=str)
def test_layout_trains_the_same_model(row: Row) -> None:
    check(row)


@pytest.mark.full
@pytest.mark.parametrize("row", WIDE, ids=str)
def test_wider_layout_trains_the_same_model(row: Row) -> None:
    check(row)
