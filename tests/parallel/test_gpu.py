from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.plan import gpt_plan
from megalight.nn.init import initialize as initialize_whole
from megalight.parallel.apply import parallelize
from megalight.parallel.initial_values import initialize, materialize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.random import RandomStreams
from megalight.parallel.shared_state import ParallelDropout, SharedState
from megalight.types import PackedSequences
from tests.parallel.gathering import gather_canonical, relative_error
from tests.parallel.test_apply import BASE, canonical

pytestmark = pytest.mark.gpu


def test_streams_on_the_device() -> None:
    draws = []
    for rank in range(2):
        streams = RandomStreams(ParallelMesh(2, rank, tp=2))
        streams.seed(0)
        before = torch.rand(4, device="cuda")
        with streams.fork("tensor", "cuda"):
            inside = torch.rand(4, device="cuda")
        draws.append((before, inside, torch.rand(4, device="cuda")))
    equal = [torch.equal(a, b) for a, b in zip(*draws, strict=True)]
    assert equal == [True, False, True]


def test_dropout_is_recomputed_alike() -> None:
    dropout = ParallelDropout(0.5, SharedState(ParallelMesh(2, 1, tp=2)), split=True)
    layer = nn.Linear(64, 64, device="cuda")
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    grads = []
    for recompute in (False, True):
        torch.manual_seed(0)
        y = checkpoint(lambda x: dropout(layer(x)).square(), x, use_reentrant=False) if recompute else None
        (dropout(layer(x)).square() if y is None else y).sum().backward()
        grads.append(x.grad.clone())
        x.grad = None
    assert torch.equal(grads[0], grads[1])


def test_initial_values_on_the_device() -> None:
    config = GPTConfig(**{**BASE, "hidden_size": 1500, "num_heads": 4})
    with torch.device("meta"):
        whole, model = GPT(config), GPT(config)
    specs = parallelize(model, gpt_plan(model), ParallelMesh(2, 1, tp=2))
    for one in (whole, model):
        materialize(one, "cuda")
    initialize_whole(whole, 3)
    initialize(model, specs, 3)
    same = canonical(whole, dict(whole.named_parameters()))
    for name, parameter in model.named_parameters():
        for piece in specs[name].pieces:
            assert torch.equal(piece.view(parameter.detach()), same[piece.name][piece.box])


def _nccl(rank: int, size: int, meeting: str) -> None:
    torch.cuda.set_device(rank)
    # By a file: a port that is free now may be taken by another test when rank 0 wants it.
    store = dist.FileStore(meeting, size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=torch.device("cuda", rank))
    mesh = ParallelMesh(size, rank, tp=size)
    for sequence_parallel in (False, True):
        config = GPTConfig(**{**BASE, "hidden_size": 64, "head_dim": 16, "num_kv_heads": 2, "tie_embeddings": True})
        with torch.device("cuda"):
            whole = GPT(config).double()
        initialize_whole(whole, 1)
        model = copy.deepcopy(whole)
        specs = parallelize(model, gpt_plan(model), mesh, sequence_parallel=sequence_parallel)
        sequences = PackedSequences.of_lengths([5, 7, 3], "cuda").pad_to(size)
        tokens = torch.arange(sequences.num_tokens, device="cuda") % config.vocab_size
        for one in (whole, model):
            one(tokens, sequences, tokens).losses.sum().backward()
        grads = gather_canonical({n: p.grad for n, p in model.named_parameters()}, specs, mesh)
        wanted = canonical(whole, {n: p.grad for n, p in whole.named_parameters()})
        errors = {name: relative_error(grads[name].cpu(), wanted[name].cpu()) for name in wanted}
        assert max(errors.values()) < 1e-9, errors
    dist.destroy_process_group()


def test_parity_over_nccl(tmp_path: Path) -> None:
    size = min(torch.cuda.device_count(), 4) // 2 * 2
    if not size:
        pytest.skip("needs two GPUs")
    mp.spawn(_nccl, (size, str(tmp_path / "meeting")), nprocs=size)
