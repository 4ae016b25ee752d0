"""Parameters are gathered while Muon computes other matrices: the order of events, and the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import megalight
from megalight.models.gpt import GPT
from megalight.models.gpt.module import GPTModule
from megalight.optim import Muon, whole_matrices
from megalight.parallel.data_parallel.gather import Gatherer
from megalight.parallel.data_parallel.options import DataParallelOptions
from tests.optim.test_muon import CONFIG, MUON
from tests.strategies.training import BASE, global_batch
from tests.support.workers import run

LAYERS = 6
MODEL = replace(BASE, num_layers=LAYERS)


def _train(level: str, overlapped: bool) -> dict[str, Any]:
    """Three steps; the events of the last one, and the weights after it."""
    events: list[Any] = []
    update, send, exchange = Muon.update, Gatherer.send, whole_matrices.MatrixExchange.update

    def updated(self: Any, matrices: Any, state: Any) -> Any:
        events.append("update")
        return update(self, matrices, state)

    def sent(self: Any, bucket: Any) -> None:
        events.append([info.name for info in bucket.infos])
        send(self, bucket)

    def at_the_end(self: Any, flats: Any, function: Any) -> Iterator[int]:
        return iter(list(exchange(self, flats, function)))

    options = DataParallelOptions(level=level, bucket_size=4000)
    with torch.device("meta"):
        root = GPT(MODEL)
    model = megalight.parallelize(root, megalight.Layout(data_parallel=options), seed=1)
    # Two matrices of the largest shape go together.
    muon = replace(MUON, gather_bytes=2 * 4 * 48 * 32, ns_dtype="float32")
    optimizer, _ = replace(CONFIG, muon=muon).build(model.root.named_parameters())
    training = megalight.Training(model, optimizer, GPTModule(MODEL))
    with (
        patch.object(Muon, "update", updated),
        patch.object(Gatherer, "send", sent),
        patch.object(whole_matrices.MatrixExchange, "update", exchange if overlapped else at_the_end),
    ):
        for step in range(3):
            training.forward_backward([global_batch(step)])
            events.clear()
            optimizer.step()
    training.sync_parameters()
    return {"events": list(events), "weights": {n: p.detach().clone() for n, p in model.root.named_parameters()}}


@pytest.mark.parametrize("level", ["optim", "optim_grads"])
def test_parameters_travel_under_updates(level: str) -> None:
    first, second = run(_train, 2, level, True)
    sends = [each for each in first["events"] if each != "update"]
    assert sends == [each for each in second["events"] if each != "update"], "ranks send in different orders"
    assert len(sends) > LAYERS
    # What Adam updates needs no other rank, and is on its way before the first matrix.
    early = first["events"][: first["events"].index("update")]
    assert any("norm" in name for names in early for name in names)
    # Layers follow in the order of the forward pass, each as soon as its matrices are there.
    layers = [max(int(n.split("layers.")[1].split(".")[0]) for n in names) for names in sends[len(early) :]]
    assert layers == sorted(layers)
    ends = [index for index, each in enumerate(first["events"]) if each == "update"]
    assert sum(each != "update" for each in first["events"][len(early) : ends[-1]]) >= LAYERS // 2

    for found, expected in zip((first, second), run(_train, 2, level, False), strict=True):
        assert expected["events"][-1] != "update"
        for name, weight in expected["weights"].items():
            assert weight.isfinite().all()
            assert torch.equal(found["weights"][name], weight), name
