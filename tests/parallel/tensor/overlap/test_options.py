"""What is asked for acts, or is refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalight.errors import ConfigurationError, LayoutError
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.plan import gpt_plan
from megalight.ops.parameter import state_of
from megalight.parallel import shared_state as shared_module
from megalight.parallel.apply import check_overlap, parallelize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.peers import memory
from megalight.parallel.shared_state import OVERLAPS, SharedState, choose, gains_by_recording, steps_recorded
from megalight.parallel.tensor.linear import ColumnLinear
from megalight.parallel.tensor.overlap import symmetric
from megalight.parallel.tensor.overlap.spec import MAX_CTAS, OverlapSpec, TensorOptions
from tests.parallel.test_apply import BASE
from tests.support.workers import run

SPEC = OverlapSpec(2, True, "cuda", torch.bfloat16, torch.bfloat16, low_precision=False, autocast=False)


def split(options: TensorOptions, tp: int = 2, sequence_parallel: bool = True) -> nn.Module:
    with torch.device("meta"):
        model = GPT(GPTConfig(**BASE, num_kv_heads=2))
    parallelize(model, gpt_plan(model), ParallelMesh(tp, 0, tp=tp), sequence_parallel=sequence_parallel, tensor=options)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorOptions(pieces=0), r"TensorOptions\.pieces=0; it must be at least 1"),
        (lambda: TensorOptions(max_ctas=0), r"TensorOptions\.max_ctas=0"),
        (lambda: split(TensorOptions(pieces=4)), r"pieces=4 does not divide tp=2.*Choose a divisor"),
        (
            lambda: split(TensorOptions(overlap={"*.mlp.gateup": "plain"})),
            r"'\*\.mlp\.gateup' of TensorOptions\.overlap matches no split layer.*layers\.0\.attention\.qkv",
        ),
        (
            lambda: split(TensorOptions(keep_gathered=True), sequence_parallel=False),
            r"keep_gathered=True needs sequence parallelism",
        ),
        (
            lambda: check_overlap(split(TensorOptions(overlap="symetric")), torch.device("cpu")),
            r"layers\.0\.attention\.qkv: .*no backend 'symetric'.*Did you mean 'symmetric'",
        ),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("pipelined", {"low_precision": True}, "8 or 4 bits"),
        ("pipelined", {"autocast": True}, "autocast"),
        ("pipelined", {"dtype": torch.float32}, "needs inputs of the weight's dtype"),
        ("symmetric", {"device": "cpu"}, "needs tensors on cuda"),
        ("symmetric", {"sequence_parallel": False}, "needs sequence parallelism"),
        ("symmetric", {"weight_dtype": torch.float32}, "serves bfloat16 and float16"),
        ("symmetric", {"low_precision": True}, "8 or 4 bits"),
    ],
)
def test_reasons(name: str, changes: dict[str, Any], reason: str) -> None:
    here = memory.why_not if "device" in changes else lambda device: None
    with patch.object(memory, "why_not", here):
        answers = {backend.name: answer for backend, answer in OVERLAPS.table(SPEC)}
        assert answers["pipelined"] is None
        found = {backend.name: answer for backend, answer in OVERLAPS.table(replace(SPEC, **changes))}
    assert reason in str(found[name])
    assert found["plain"] is None


def test_peers_on_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "why_not", lambda device: None)
    monkeypatch.setattr(memory, "unreachable", lambda group: f"{group} is far away")
    assert symmetric.why_not(replace(SPEC, group="somebody")) == "somebody is far away"  # type: ignore[arg-type]
    assert symmetric.why_not(SPEC) is None


def test_auto_takes_copy_engines_for_recorded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "why_not", lambda device: None)
    assert choose("", SPEC, "auto").name == "plain"
    assert choose("", replace(SPEC, recorded=True), "auto").name == "symmetric"
    assert choose("", replace(SPEC, recorded=True, low_precision=True), "auto").name == "plain"
    model = split(TensorOptions())
    layer = next(module for module in model.modules() if isinstance(module, ColumnLinear))
    for recorded in (True, False):
        steps_recorded(model, recorded)
        assert layer.shared._spec(torch.zeros(1), torch.device("cpu"), None, None).recorded is recorded


def test_all_ways_begin_anew_when_recording_begins_or_ends() -> None:
    model = split(TensorOptions())
    layer = next(module for module in model.modules() if isinstance(module, ColumnLinear))
    begun: list[str] = []
    for name in ("plain", "symmetric"):
        layer.shared._ways[name] = SimpleNamespace(restart=lambda name=name: begun.append(name))  # type: ignore[assignment]
    steps_recorded(model, True)
    assert begun == ["plain", "symmetric"]


def test_layers_know_whether_recording_would_hide_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "why_not", lambda device: None)
    for kind, spec, gains in (
        ("auto", SPEC, True),
        ("auto", replace(SPEC, recorded=True), True),
        ("auto", replace(SPEC, low_precision=True), False),
        ("plain", SPEC, False),
    ):
        model = split(TensorOptions())
        assert not gains_by_recording(model), "no layer has run"
        layer = next(module for module in model.modules() if isinstance(module, ColumnLinear))
        layer.shared._overlaps[kind, spec] = None  # type: ignore[assignment]
        assert gains_by_recording(model) is gains


def per_layer(limit: int | None) -> tuple[list[str], list[int | None]]:
    """The ways of layers by pattern, and the limit of the group for messages."""
    asked: list[int | None] = []

    def group(ranks: Any, purpose: str, max_ctas: int | None = None, urgent: bool = False) -> Any:
        assert urgent
        asked.append(max_ctas)
        return dist.group.WORLD

    options = TensorOptions(overlap={"*.qkv": "pipelined", "*.proj": "plain"}, max_ctas=limit)
    shared = SharedState(ParallelMesh(2, dist.get_rank(), tp=2), True, tensor=options)
    x, weight = torch.zeros(2, 4), torch.zeros(6, 4)
    with patch.object(shared_module, "new_group", group), patch.object(dist, "get_backend", lambda: "nccl"):
        ways = [shared.overlap(f"layers.0.{name}", x, weight) for name in ("qkv", "proj", "up", "qkv")]
    assert ways[0] is ways[3]
    assert ways[1] is ways[2]
    return [type(way).__name__ for way in ways], asked


def test_patterns_and_the_limit_on_sms_act() -> None:
    for limit, given in ((5, 5), (None, MAX_CTAS)):
        assert run(per_layer, 2, limit) == [(["Pipelined", "NoOverlap", "NoOverlap", "Pipelined"], [given])] * 2


def limited(way: str) -> None:
    shared = SharedState(ParallelMesh(2, dist.get_rank(), tp=2), True, tensor=TensorOptions(overlap=way, max_ctas=5))
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"TensorOptions\.max_ctas=5 limits.*here is gloo\. Remove it"):
            shared.overlap("qkv", torch.zeros(2, 4), torch.zeros(6, 4))


@pytest.mark.parametrize("way", ["plain", "pipelined"])
def test_a_limit_on_sms_needs_nccl(way: str) -> None:
    run(limited, 2, way)


def kept(keep: bool) -> tuple[int, int]:
    """Numbers that a column layer keeps, and gathers in the backward pass."""
    gathers = []
    options = TensorOptions(keep_gathered=keep)
    shared = SharedState(ParallelMesh(2, dist.get_rank(), tp=2), True, tensor=options)
    module = ColumnLinear(nn.Parameter(torch.ones(6, 5)), None, [6], shared)
    x = torch.ones(4, 5, requires_grad=True)
    way = shared.overlap("", x, module.weight)
    start = way.start_gather
    way.start_gather = lambda share, dim: gathers.append(share) or start(share, dim)  # type: ignore[method-assign]
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
        y = module(x)
    y.sum().backward()
    torch.testing.assert_close(module.weight.grad, torch.full((6, 5), 8.0))
    return sum(sizes), len(gathers)


def test_keep_gathered_trades_memory_for_a_gather() -> None:
    assert run(kept, 2, False) == [(4 * 5, 1)] * 2
    assert run(kept, 2, True) == [(8 * 5, 0)] * 2


@pytest.mark.parametrize(
    ("overlap", "refused"), [("pipelined", True), ("auto", False), ({"*.proj": "pipelined"}, False)]
)
def test_layers_in_eight_bits(overlap: Any, refused: bool) -> None:
    """A named way says so before training; ``auto``, and patterns that leave the layer out, do without it there."""
    model = split(TensorOptions(overlap=overlap))
    state_of(model.layers["1"].mlp.down.weight).precision = object()  # type: ignore[union-attr]
    if refused:
        with pytest.raises(LayoutError, match=r"layers\.1\.mlp\.down: .*pipelined: has no products in 8 or 4 bits"):
            check_overlap(model, torch.device("cpu"))
    else:
        check_overlap(model, torch.device("cpu"))
