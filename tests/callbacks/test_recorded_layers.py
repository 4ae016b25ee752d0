"""Split layers from graphs, with every way to send: on a tape, with peers' memory in shared files."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from megalight.callbacks import CUDAGraph
from megalight.parallel.tensor.overlap.pipelined import Pipelined
from megalight.parallel.tensor.overlap.spec import NoOverlap, TensorOptions
from megalight.parallel.tensor.overlap.symmetric import Symmetric
from tests.callbacks.test_cuda_graph import DROPPING, NEVER
from tests.parallel.graphs.tape import Tape
from tests.parallel.peers.shared_files import symmetric_on_cpu
from tests.strategies.training import assert_same_run, fit
from tests.support.workers import run

STEPS = 6
LAYOUT: dict[str, Any] = {"micro_batch_size": 2, "tensor_parallel": 2, "sequence_parallel": True}
WAYS = {"plain": NoOverlap, "pipelined": Pipelined, "symmetric": Symmetric}


class Spoiler(pl.Callback):
    """Changes a layer, or lets a recording fail, on one rank alone."""

    reads_weights = False

    def __init__(self, what: str | None, tape: Tape) -> None:
        self.what = what if dist.get_rank() == 1 else None
        if self.what == "recording":
            tape.fail_at = 4

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.what == "attribute" and batch_idx == 4:
            pl_module.model.layers["1"].mark = batch_idx


def trained(scope: Any, warmup: int, overlap: str, spoiled: str | None = None) -> dict[str, Any]:
    """A run; what was recorded; and in which ways layers have gathered, by whether steps were warm-up or later ones."""
    callback = CUDAGraph(scope, warmup_steps=warmup)
    callback.recorder = tape = Tape()
    used: Counter[str] = Counter()

    def counted(name: str, kind: Any) -> Any:
        own = kind.gather_product

        def gather_product(self: Any, *args: Any, **kwargs: Any) -> Any:
            if type(self) is kind:
                used[name] += 1
            return own(self, *args, **kwargs)

        return patch.object(kind, "gather_product", gather_product)

    with (
        symmetric_on_cpu(),
        counted("plain", NoOverlap),
        counted("pipelined", Pipelined),
        counted("symmetric", Symmetric),
    ):
        callbacks = [callback, Spoiler(spoiled, tape)]
        found = fit(DROPPING, STEPS, extra_callbacks=callbacks, tensor=TensorOptions(overlap=overlap), **LAYOUT)
    return {**found, "replays": callback.replays, "made": tape.made, "reasons": callback.reasons, "used": set(used)}


@pytest.fixture(scope="module")
def eager() -> list[dict[str, Any]]:
    found = run(trained, 2, "layer", NEVER, "plain")
    assert all(each["used"] == {"plain"} for each in found)
    return found


@pytest.mark.parametrize(
    ("scope", "overlap", "way"),
    [
        ("layer", "auto", "symmetric"),
        pytest.param("layer", "pipelined", "pipelined", marks=pytest.mark.full),
        pytest.param("layer", "symmetric", "symmetric", marks=pytest.mark.full),
        # The other half of a layer runs eagerly, where copies take the host longer than they save.
        pytest.param("attention", "auto", "plain", marks=pytest.mark.full),
        pytest.param("attention", "symmetric", "symmetric", marks=pytest.mark.full),
        pytest.param("iteration", "auto", "symmetric", marks=pytest.mark.full),
        pytest.param("iteration", "pipelined", "pipelined", marks=pytest.mark.full),
    ],
)
def test_recorded_layers_send_as_eager_ones(scope: str, overlap: str, way: str, eager: list[dict[str, Any]]) -> None:
    for here, there in zip(run(trained, 2, scope, 2, overlap), eager, strict=True):
        assert (here["reasons"], here["used"]) == ([], {way})
        assert here["replays"] == (STEPS - 2) * (1 if scope == "iteration" else 4)
        assert_same_run(here, there, 1e-13)


@pytest.mark.full
def test_ranks_record_anew_together(eager: list[dict[str, Any]]) -> None:
    """Slots are counted on the host. A rank that records alone would expect its peers in another slot."""
    for here, there in zip(run(trained, 2, "layer", 2, "auto", "attribute"), eager, strict=True):
        assert here["reasons"] == []
        assert (here["replays"], here["made"]) == ((STEPS - 2) * 4, 2 * 4)
        assert_same_run(here, there, 1e-13)


def test_ranks_give_up_together(eager: list[dict[str, Any]]) -> None:
    one, other = run(trained, 2, "layer", 2, "auto", "recording")
    for here, there in zip((one, other), eager, strict=True):
        assert (here["replays"], here["used"]) == (1, {"symmetric", "plain"})  # without graphs, back to collectives
        assert_same_run(here, there, 1e-13)
    assert one["reasons"] == ["recording layers.1 failed on another rank"]
    assert "recording layers.1 failed: RuntimeError: operation not permitted" in other["reasons"][0]
