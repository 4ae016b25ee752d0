"""The dispatchers of DeepEP against a stand-in of its published interface, which ranks run over gloo."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalight.errors import ConfigurationError, LayoutError
from megalight.models.gpt.plan import gpt_plan
from megalight.nn.init import initialize as initialize_whole
from megalight.nn.moe import CapacityConfig, LocalDispatcher
from megalight.ops.router import Routes
from megalight.parallel.apply import parallelize
from megalight.parallel.expert import DISPATCHERS, ExpertOptions
from megalight.parallel.initial_values import initialize, materialize
from megalight.parallel.interleaved_passes import PassInterleaver
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.pipeline.schedules import PipelineOptions
from megalight.parallel.shared_state import SharedState
from megalight.plugins import package
from megalight.types import PackedSequences
from tests.parallel.expert.model import build
from tests.parallel.gathering import gather_canonical, relative_error
from tests.parallel.test_apply import canonical
from tests.plugins import deep_ep
from tests.support.workers import run

NAMES = ("deepep", "hybridep")
WIDTH, EXPERTS = 8, 4
ROUTES = [[[0, 3], [1, 2], [-1, 2], [3, 0]], [[2, 1]]]
"""The experts of each token, by rank; a third and a fourth rank have none."""


@contextmanager
def stand_in() -> Iterator[None]:
    fresh = functools.lru_cache(package._load.__wrapped__)
    with (
        patch.dict(sys.modules, {"deep_ep": deep_ep}),
        patch.object(package, "cuda_why_not", lambda device: None),
        patch.object(package, "_load", fresh),
    ):
        yield


def inputs(rank: int) -> tuple[Tensor, Routes, Tensor]:
    """Small integers, and halves as weights: bfloat16 holds all results exactly, in any order of sums."""
    experts = torch.tensor(ROUTES[rank] if rank < len(ROUTES) else [], dtype=torch.int64).view(-1, 2)
    generator = torch.Generator().manual_seed(rank)
    hidden, cotangent = torch.randint(-2, 3, (2, len(experts), WIDTH), generator=generator).bfloat16()
    probs = torch.randint(1, 3, experts.shape, generator=generator) / 2
    return hidden.requires_grad_(), Routes(probs.requires_grad_(), experts), cotangent


def answers(dispatcher: Any, rank: int, etp: int, count: int, first: int) -> list[Tensor]:
    """Output and gradients; expert ``e`` multiplies by ``e + 1``, or by its share of that along ``etp``."""
    hidden, routes, cotangent = inputs(rank)
    copies, memo = dispatcher.dispatch(hidden, routes, count)
    ends = copies.offsets.tolist()
    assert copies.sizes is None or list(copies.sizes) == torch.tensor([0, *ends]).diff().tolist()
    assert not any(end % dispatcher.alignment for end in ends)
    expert = first + torch.searchsorted(copies.offsets, torch.arange(len(copies.tokens)), right=True)
    factor = (copies.probs * (expert + 1) / etp).unsqueeze(1)
    out = dispatcher.combine((copies.tokens * factor).bfloat16()[: len(copies.tokens)], memo)
    wanted = [hidden, routes.probs]
    return [out.detach(), *torch.autograd.grad((out * cotangent).sum(), wanted)]


def _dispatched(
    name: str, degrees: dict[str, int], in_turns: bool, alignment: int = 1
) -> tuple[list[Tensor], list[Tensor]]:
    mesh = ParallelMesh(dist.get_world_size(), dist.get_rank(), **degrees)
    count = EXPERTS // mesh.ep
    found: list[list[Tensor]] = []
    with stand_in():
        dispatcher = DISPATCHERS[name](SharedState(mesh, expert=ExpertOptions(name, num_sms=12)))
        dispatcher.alignment = alignment

        def compute() -> None:
            found.append(answers(dispatcher, mesh.global_rank, mesh.etp, count, mesh.rank("ep") * count))

        if in_turns:
            PassInterleaver(torch.device("cpu")).play(compute, compute, lambda: None)
        else:
            compute()
    limited = deep_ep.Buffer.num_sms if name == "deepep" else deep_ep.HybridEPBuffer.num_sms
    assert limited in (12, (12, 12))
    return found[-1], answers(LocalDispatcher(), mesh.global_rank, 1, EXPERTS, 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "degrees"), [(2, {"ep": 2}), (2, {"etp": 2}), (4, {"ep": 2, "etp": 2})])
def test_outputs_and_gradients_are_those_of_one_device(name: str, ranks: int, degrees: dict[str, int]) -> None:
    for found, wanted in run(_dispatched, ranks, name, degrees, False):
        for actual, expected in zip(found, wanted, strict=True):
            assert actual.dtype == expected.dtype
            assert actual.equal(expected)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_each_expert_are_padded(name: str) -> None:
    for found, wanted in run(_dispatched, 2, name, {"ep": 2}, False, 16):
        assert all(actual.equal(expected) for actual, expected in zip(found, wanted, strict=True))


def test_messages_in_turns() -> None:
    for found, wanted in run(_dispatched, 2, "deepep", {"ep": 2}, True):
        assert all(actual.equal(expected) for actual, expected in zip(found, wanted, strict=True))


def _model(name: str) -> dict[str, float]:
    """Gradients of a model in bfloat16, against those of one device in float64."""
    mesh = ParallelMesh(dist.get_world_size(), dist.get_rank(), ep=2)
    sequences = PackedSequences.of_lengths([7, 5])
    whole = build().double()
    initialize_whole(whole, 3)
    batches = [torch.randint(0, 101, (2, 12), generator=torch.Generator().manual_seed(r)) for r in range(2)]
    torch.stack([whole(ids, sequences, labels).losses.sum() for ids, labels in batches]).sum().backward()
    wanted = canonical(whole, {name: p.grad for name, p in whole.named_parameters()})
    model = build().bfloat16().to("meta")
    with stand_in():
        specs = parallelize(model, gpt_plan(model), mesh, expert=ExpertOptions(name))
        materialize(model, "cpu")
        initialize(model, specs, 3)
        model(batches[mesh.rank("dp")][0], sequences, batches[mesh.rank("dp")][1]).losses.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for local, gradient in gradients.items():
        if specs[local].data != ("edp",):
            dist.all_reduce(gradient)
    found = gather_canonical(gradients, specs, mesh, sum_partial=False)
    return {name: relative_error(found[name].double(), wanted[name]) for name in wanted}


@pytest.mark.parametrize("name", NAMES)
def test_a_model_learns_through_it(name: str) -> None:
    for errors in run(_model, 2, name):
        assert max(errors.values()) < 0.1, errors


@pytest.mark.parametrize("name", NAMES)
def test_without_the_package(name: str) -> None:
    with torch.device("meta"):
        model = build()
    with pytest.raises(LayoutError, match=rf"dispatcher='{name}' cannot serve: needs the package deep_ep.*all_to_all"):
        parallelize(model, gpt_plan(model), ParallelMesh(2, 0, ep=2), expert=ExpertOptions(name))


def test_a_number_of_ranks_without_kernels() -> None:
    wanted = "no kernels for ep x etp = 6 ranks .Unsupported number of EP ranks: 6.*all_to_all"
    with stand_in(), pytest.raises(LayoutError, match=wanted):
        DISPATCHERS["deepep"](SharedState(ParallelMesh(6, 0, ep=3, etp=2)))


def test_a_release_with_another_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(deep_ep.Buffer):
        def combine(self, x: Tensor, handle: Any) -> Any:  # type: ignore[override]
            return None

    monkeypatch.setattr(deep_ep, "Buffer", Old)
    with stand_in(), pytest.raises(LayoutError, match=r"Buffer\.combine takes no topk_weights, async_finish in this"):
        DISPATCHERS["deepep"](SharedState(ParallelMesh(2, 0, ep=2)))

    class OldHybrid(deep_ep.HybridEPBuffer):
        def dispatch_with_permute(  # type: ignore[override]
            self, *, hidden: Tensor, routing_map: Any, probs: Any, num_permuted_tokens: Any, handle: Any
        ) -> Any:
            return None

    monkeypatch.setattr(deep_ep, "HybridEPBuffer", OldHybrid)
    with stand_in(), pytest.raises(LayoutError, match="dispatch_with_permute takes no num_of_experts_per_rank in this"):
        DISPATCHERS["hybridep"](SharedState(ParallelMesh(2, 0, ep=2)))
    monkeypatch.delattr(deep_ep, "HybridEPBuffer")
    with stand_in(), pytest.raises(LayoutError, match=r"deep_ep has no HybridEPBuffer"):
        DISPATCHERS["hybridep"](SharedState(ParallelMesh(2, 0, ep=2)))


def test_rows_that_would_lose_digits() -> None:
    with stand_in():
        dispatcher = DISPATCHERS["deepep"](SharedState(ParallelMesh(2, 0, ep=2)))
    routes = Routes(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ConfigurationError, match=r"sends bfloat16 rows .* here they are torch.float32"):
        dispatcher.dispatch(torch.ones(1, WIDTH), routes, 2)


@pytest.mark.parametrize("name", NAMES)
def test_capacity_with_padding(name: str) -> None:
    with torch.device("meta"):
        model = build(capacity=CapacityConfig(factor=1.0, pad=True))
    with stand_in(), pytest.raises(LayoutError, match=rf"moe.capacity.pad=true with dispatcher='{name}'"):
        parallelize(model, gpt_plan(model), ParallelMesh(2, 0, ep=2), expert=ExpertOptions(name))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_sms": 20}, "num_sms=20 with dispatcher='all_to_all'"),
        ({"dispatcher": "deepep", "num_sms": 7}, "num_sms=7; it must be even"),
        ({"dispatcher": "hybridep", "num_sms": 0}, "num_sms=0; it must be even"),
        (
            {"dispatcher": "deepep", "shared_expert_overlap": True},
            "shared_expert_overlap=True with dispatcher='deepep'",
        ),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ExpertOptions(**options)


def test_a_schedule_that_hides_nothing() -> None:
    with pytest.raises(LayoutError, match=r"dispatcher='hybridep'\), whose messages block"):
        Layout(expert=ExpertOptions("hybridep"), pipeline=PipelineOptions(schedule="combined"))


def test_defaults() -> None:
    kinds = {name: importlib.import_module("megalight.plugins.deepep") for name in NAMES}
    assert kinds["deepep"].DeepEPDispatcher.num_sms == 20
    assert kinds["hybridep"].HybridEPDispatcher.num_sms == 16
