"""Graphs of the layers of vision towers, in any layout, and of whole steps: the run of one device by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from megalight.callbacks import CUDAGraph
from megalight.callbacks.cuda_graph import tower_parts_of
from megalight.callbacks.cuda_graph_validation import of_backend
from megalight.models.vlm import VLM, task
from megalight.models.vlm.task import freeze
from megalight.nn.init import initialize
from megalight.parallel.recompute import RecomputeOptions, apply_recompute
from megalight.strategies import (
    DataParallelOptions,
    Layout,
    MegatronStrategy,
    MegatronTowersStrategy,
)
from megalight.types import PackedSequences, packed_sequences
from tests.models.test_vlm_strategy import CONFIGS, by_hand, fit
from tests.models.vlm_samples import HUGE, batch
from tests.parallel.graphs.tape import Tape
from tests.strategies.test_towers import joined
from tests.strategies.training import assert_same_gradients, assert_same_run
from tests.support.workers import run

STEPS = 4
SP = {"tensor_parallel": 2, "sequence_parallel": True}
PP, CP = {"pipeline_parallel": 2}, {"context_parallel": 2}
SHARDED = {"data_parallel": DataParallelOptions(level="optim_grads_params")}
DISJOINT = {"placement": "disjoint"}


def recorded(name: str, counts: str, scope: Any, options: dict[str, Any]) -> dict[str, Any]:
    """A run in every rank, whose layers are recorded after two steps."""
    callback = CUDAGraph(scope, warmup_steps=2)
    callback.recorder = tape = Tape()
    found = fit(name, counts, {**options, "micro_batch_size": 1}, also=(callback,))
    assert tape.entered == 0
    assert not tape.tapes, "all is given back"
    return {**found, "replays": callback.replays, "reasons": callback.reasons}


RUNS: dict[str, tuple[str, int, str, str, dict[str, Any], list[int]]] = {
    # Scope, ranks, model, images of rows, options; replayed forwards of a step on each rank, or the step.
    "colocated": ("layer", 2, "llava", "same", {"tower": Layout(), **SP}, [2 * 4 + 2 * 4] * 2),
    "disjoint": ("layer", 2, "intern", "same", {**DISJOINT, "tower": Layout()}, [2 * 4] * 2),
    # The tower's ranks divide rows of images for their layers, and trade them for heads in attention.
    "disjoint, cp of the tower": (
        "layer",
        3,
        "qwen3",
        "same_huge",
        {**DISJOINT, "tower": Layout(ranks=2, **CP)},
        [12, 12, 8],
    ),
    "colocated, attention, sharded": (
        "attention",
        2,
        "qwen3",
        "same_huge",
        {"tower": Layout(**SP), **SHARDED},
        [3 * 2 + 2 * 2] * 2,
    ),
    "together": ("layer", 2, "llava", "same", PP, [2 * 4 + 1 * 4, 1 * 4]),
    "colocated, pp": ("layer", 2, "deep", "same", {"tower": Layout(), **PP}, [2 * 4 + 2 * 4] * 2),
    "disjoint, sharded": ("layer", 4, "llava", "same", {**DISJOINT, "tower": Layout(ranks=2), **SHARDED}, [4] * 4),
    # A frozen tower has no backward pass.
    "frozen": ("layer", 2, "frozen", "same", {"tower": Layout(), **SP}, [2 * 4] * 2),
    "adapters": ("layer", 2, "tower_adapters", "same", {"tower": Layout(), **SP}, [2 * 4 + 2 * 4] * 2),
    "together, whole steps": ("iteration", 2, "llava", "same", SP, [1] * 2),
    "colocated, whole steps": ("iteration", 2, "llava", "same", {"tower": Layout(), **SP}, [1] * 2),
    "colocated, whole steps, pp": ("iteration", 2, "deep", "same", {"tower": Layout(), **PP}, [1] * 2),
    "colocated, whole steps, cp": (
        "iteration",
        2,
        "qwen",
        "same_huge",
        {"tower": Layout(**CP), **SP},
        [1] * 2,
    ),
    "colocated, whole steps, frozen": (
        "iteration",
        2,
        "frozen",
        "same",
        {"tower": Layout(), **SP},
        [1] * 2,
    ),
    # The first replica always sees the same shapes, but a graph is of the shapes of both: each of two is replayed once.
    "colocated, whole steps, replicas": (
        "iteration",
        2,
        "llava",
        "other_replica",
        {"tower": Layout(**SP)},
        [1] * 2,
    ),
    "recompute": (
        "layer",
        2,
        "llava",
        "same",
        {"tower": Layout(recompute=RecomputeOptions(granularity="full")), **SP},
        [2 * 4] * 2,
    ),
}
DEFAULT = ("disjoint", "colocated, whole steps, replicas")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in DEFAULT)) for name in RUNS]
)
def test_replays_train_the_model_of_one_device(name: str) -> None:
    scope, ranks, model, counts, options, replays = RUNS[name]
    every = run(recorded, ranks, model, counts, scope, options, timeout=240)
    assert [rank["reasons"] for rank in every] == [[]] * ranks
    assert [rank["replays"] for rank in every] == [(STEPS - 2) * each for each in replays]
    whole, expected = joined(every), by_hand(model, counts)
    assert_same_gradients(whole["gradients"], expected["gradients"])
    assert_same_run(whole, expected)


def test_other_images_run_eagerly() -> None:
    """The third micro-batch of each step does so, in the tower alone: its text has the shape of the others."""
    (found,) = run(recorded, 1, "llava", "nearly_same", "layer", {})
    assert found["replays"] == 2 * (2 * 3 + 2 * 4)
    assert found["reasons"] == [
        "embed.tower.layers.0 is called with arguments of a different form than when it was recorded"
    ]
    assert_same_run(found, by_hand("llava", "nearly_same"))


@pytest.mark.parametrize("name", ["qwen", "llava"])
def test_images_of_known_sizes_bring_no_copies_from_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such copies in a step would keep it from being recorded. Evaluation, which keeps no graph, may come first."""
    copies, plain = list[Any](), packed_sequences.to_device

    def watched(values: Any, *more: Any) -> Any:
        copies.append(values)
        return plain(values, *more)

    monkeypatch.setattr(packed_sequences, "to_device", watched)
    task._kept_sequences.cache_clear()
    config: Any = CONFIGS[name]
    model: Any = VLM(config)
    initialize(model, 0, "model.")
    for number, grad in enumerate((False, True, True)):
        rows = batch((2, HUGE, 1), seed=0, config=config)
        (images, source), sequences = rows.parts(), rows.sequences
        copies.clear()
        with torch.inference_mode(not grad):
            packed_images = task.pack_images(config, images, source.flatten(), 4)
            losses = model(
                rows.tokens.flatten(), sequences, labels=rows.labels.flatten(), packed_images=packed_images
            ).losses
        copied = len(copies)
        multiple = 4 * config.projector.merge**2
        expected = PackedSequences.of_lengths(images.lengths).pad_to(multiple)
        assert torch.equal(packed_images.sequences.cu_seqlens, expected.cu_seqlens)
        if grad:
            losses.sum().backward()
        assert bool(copied) == (number == 0 and name == "qwen")


def test_whole_steps_of_a_disjoint_tower_are_not_recorded() -> None:
    for found in run(recorded, 2, "llava", "same", "iteration", {**DISJOINT, "tower": Layout()}):
        assert found["replays"] == 0
        assert re.search(
            r"reads on the host, in the middle of a step, how many rows have arrived; record both .* scope='layer'",
            found["reasons"][0],
        )


def test_backends_of_one_model_are_refused() -> None:
    (reason,) = of_backend(MegatronTowersStrategy(), "transformer_engine")
    assert "records one model, and a colocated tower is a second one" in reason
    assert not [*of_backend(MegatronTowersStrategy(), "own"), *of_backend(MegatronStrategy(), "transformer_engine")]


def test_parts_of_a_tower_begin_where_gradients_do() -> None:
    with torch.device("meta"):
        model = VLM(CONFIGS["qwen3"])
    assert [name for name, _ in tower_parts_of(model, "layer")] == [f"embed.tower.layers.{i}" for i in range(3)]
    freeze(model, ["*.tower.patch.*", "*.tower.position.*", "*.tower.layers.0.*", "*.tower.layers.1.attention.*"])
    assert [name for name, _ in tower_parts_of(model, "layer")] == [f"embed.tower.layers.{i}" for i in (1, 2)]
    # The attention of the layer before whose MLP nothing is trained has no gradient, either.
    assert [name for name, _ in tower_parts_of(model, "attention")] == ["embed.tower.layers.2.attention"]
    apply_recompute(model, RecomputeOptions(vision=RecomputeOptions(granularity="selective", modules=("attention",))))
    assert tower_parts_of(model, "layer")
    assert not tower_parts_of(model, "attention")
    apply_recompute(model, RecomputeOptions(vision=RecomputeOptions(granularity="full")))
    assert not tower_parts_of(model, "layer")
    assert not tower_parts_of(model, "attention")
