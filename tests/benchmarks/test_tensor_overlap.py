"""The benchmark of split layers times nothing that is wrong."""

from __future__ import annotations

import argparse
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.tensor_overlap import Bench, Layer, check, milliseconds, ways
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shared_state import SharedState
from megalight.parallel.tensor.overlap.pipelined import Pipelined
from megalight.parallel.tensor.overlap.spec import TensorOptions
from tests.support.workers import run

LAYERS = [Layer("qkv", 16, 24, column=True), Layer("proj", 16, 16, column=False)]


def checked() -> list[str]:
    """What is said of a right way, and of one that forgets the other ranks' tokens."""
    mesh, device = ParallelMesh(2, dist.get_rank(), tp=2), torch.device("cpu")
    shared = SharedState(mesh, True, tensor=TensorOptions(overlap="pipelined", pieces=2))
    whole = Pipelined.gather_in_pieces

    def forgetful(self: Pipelined, *args: object, keep: bool) -> object:
        y, gathered = whole(self, *args, keep=keep)  # type: ignore[arg-type]
        return torch.where(torch.arange(len(y))[:, None] < len(y) // 2, y, 0), gathered

    found = []
    for layer in LAYERS:
        check(layer, shared, device, torch.bfloat16)
        with patch.object(Pipelined, "gather_in_pieces", forgetful):
            try:
                check(layer, shared, device, torch.bfloat16)
            except RuntimeError as error:
                found.append(str(error))
        bench = Bench(layer, 16, shared, device, torch.bfloat16)
        for name in ("forward", "both", "products", "both_products", "messages", "both_messages"):
            assert milliseconds(getattr(bench, name), 1, device) > 0
    return found


def test_a_wrong_way_is_not_timed() -> None:
    for found in run(checked, 2):
        assert [text.split(" is off")[0] for text in found] == ["qkv: output", "proj: input"]


def test_every_combination_has_a_name() -> None:
    asked = argparse.Namespace(ways=["plain", "pipelined", "symmetric"], pieces=[None, 2], ctas=[8, 16], keep=True)
    found = ways(asked)
    assert len(found) == 2 + 2 * 2 * 2 + 2 * 2
    assert len({str(options) for options in found.values()}) == len(found)
    assert found["pipelined, 2 pieces, 8 CTAs, kept"] == TensorOptions(
        overlap="pipelined", pieces=2, max_ctas=8, keep_gathered=True
    )
