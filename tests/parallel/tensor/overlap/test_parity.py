"""Every way to overlap computes what one device does, and what the plain way does."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalight.models.gpt import GPTConfig
from megalight.models.gpt.plan import gpt_plan
from megalight.parallel.apply import parallelize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.recompute import RecomputeOptions, apply_recompute
from megalight.parallel.shared_state import SharedState
from megalight.parallel.tensor.linear import ColumnLinear, RowLinear
from megalight.parallel.tensor.overlap.spec import TensorOptions
from tests.parallel.peers.shared_files import symmetric_on_cpu
from tests.parallel.test_apply import BASE, VARIANTS, batch, jitter, parity, twin
from tests.support.workers import run

CASES = [
    pytest.param((2, "gpt2", True, TensorOptions(overlap="pipelined", pieces=2)), marks=pytest.mark.full),
    pytest.param((4, "gqa_two_kv_heads", True, TensorOptions(overlap="pipelined", pieces=2)), marks=pytest.mark.full),
    (4, "gpt2", True, TensorOptions(overlap="pipelined", pieces=4, keep_gathered=True)),
    (4, "mqa", True, TensorOptions(overlap={"*.mlp.*": "pipelined", "*": "plain"}, pieces=4)),
    (2, "gpt2", False, TensorOptions(overlap="pipelined", pieces=3)),  # 21 tokens: pieces of 7
    pytest.param((4, "mqa", False, TensorOptions(overlap="pipelined", pieces=4)), marks=pytest.mark.full),  # of 5 and 6
    pytest.param(
        (4, "gqa_two_kv_heads", True, TensorOptions(overlap="plain", keep_gathered=True)), marks=pytest.mark.full
    ),
    pytest.param((2, "gpt2", True, TensorOptions(overlap="symmetric", pieces=2)), marks=pytest.mark.full),
    (4, "gqa_two_kv_heads", True, TensorOptions(overlap="symmetric", pieces=2, keep_gathered=True)),
    pytest.param((4, "mqa", True, TensorOptions(overlap="symmetric", pieces=4)), marks=pytest.mark.full),
]


def one_case(variant: str, sequence_parallel: bool, tensor: TensorOptions) -> dict[str, float]:
    with symmetric_on_cpu():
        return parity(VARIANTS[variant], sequence_parallel, torch.float64, tensor)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"tp{case[0]}-{case[1]}-{case[2]}-{case[3].overlap}")
def test_losses_and_gradients_equal_one_device(case: tuple) -> None:
    tp, *rest = case
    for errors in run(one_case, tp, *rest):
        wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
        assert not wrong, wrong


def beside_plain(kind: str) -> dict[str, float]:
    """Recomputed norms and layers, and weight gradients without input gradients, in float32 against the plain way."""
    size = dist.get_world_size()
    mesh = ParallelMesh(size, dist.get_rank(), tp=size)
    whole = twin(GPTConfig(**BASE, num_kv_heads=2)).float()
    jitter(whole)
    tokens, labels, _, sequences = batch(101, [7, 1, 5, 8], size)

    def gradients(tensor: TensorOptions, recompute: RecomputeOptions) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(whole)
        parallelize(model, gpt_plan(model), mesh, sequence_parallel=True, tensor=tensor)
        apply_recompute(model, recompute)
        model.embed.requires_grad_(False)
        model(tokens, sequences, labels).losses.sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    wanted = gradients(TensorOptions(overlap="plain"), RecomputeOptions())
    errors = {}
    with symmetric_on_cpu():
        for recompute in (
            RecomputeOptions(granularity="full", num_layers=1),
            RecomputeOptions(granularity="selective", modules=("attention_norm", "mlp_norm", "mlp.act")),
        ):
            found = gradients(TensorOptions(overlap=kind, pieces=size, keep_gathered=True), recompute)
            assert found.keys() == wanted.keys()
            for name, gradient in wanted.items():
                error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
                errors[f"{recompute.granularity} {name}"] = float(error)
    return errors


@pytest.mark.parametrize("kind", ["pipelined", "symmetric"])
def test_with_recompute(kind: str) -> None:
    for errors in run(beside_plain, 2, kind):
        assert errors
        assert max(errors.values()) < 1e-5, errors


def rows_of_tokens(kind: str) -> dict[str, float]:
    """Hidden states ``[B, S, h]``, through a column and a row layer with frozen parts, against the plain way."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = ParallelMesh(size, rank, tp=size)
    generator = torch.Generator().manual_seed(rank)
    x, grad, *weights = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((3, 5, 8), (3, 5, 8), (6, 8), (6,), (8, 6))
    )

    def gradients(tensor: TensorOptions, frozen: int | None, plain_input: bool) -> list[torch.Tensor]:
        shared = SharedState(mesh, True, sequence_dim=1, tensor=tensor)
        up, bias, down = (nn.Parameter(weight.clone(), requires_grad=i != frozen) for i, weight in enumerate(weights))
        module = nn.Sequential(ColumnLinear(up, bias, [6], shared), RowLinear(down, None, shared))
        own = x.clone().requires_grad_(not plain_input)
        y = module(own)
        y.backward(grad)
        assert y.is_contiguous()
        return [y.detach(), *(t.grad for t in (own, up, bias, down) if t.grad is not None)]

    errors = {}
    with symmetric_on_cpu():
        for frozen, plain_input in ((None, False), (0, False), (2, False), (None, True)):
            wanted = gradients(TensorOptions(overlap="plain"), frozen, plain_input)
            found = gradients(TensorOptions(overlap=kind, pieces=size), frozen, plain_input)
            assert len(found) == len(wanted)
            for index, (mine, right) in enumerate(zip(found, wanted, strict=True)):
                errors[f"{frozen} {plain_input} {index}"] = float((mine - right).norm() / right.norm())
    return errors


@pytest.mark.parametrize("kind", ["pipelined", "symmetric"])
def test_tokens_in_rows_and_frozen_parts(kind: str) -> None:
    for errors in run(rows_of_tokens, 4, kind):
        assert max(errors.values()) < 1e-12, errors
