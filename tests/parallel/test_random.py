from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalight.errors import LayoutError
from megalight.models.config import DropoutConfig
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.plan import gpt_plan
from megalight.nn import InnerAttention
from megalight.parallel.apply import parallelize
from megalight.parallel.initial_values import initialize, materialize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.random import RandomStreams
from megalight.parallel.shared_state import OwnStream, ParallelDropout, SharedState
from megalight.types import PackedSequences
from tests.support.workers import run


def mesh(rank: int, **degrees: int) -> ParallelMesh:
    return ParallelMesh(8, rank, **degrees)


def drawn(rank: int, tp: int) -> tuple[list[float], list[float], list[float]]:
    streams = RandomStreams(mesh(rank, tp=tp))
    streams.seed(1)
    before = torch.rand(3).tolist()
    with streams.fork("tensor"):
        inside = torch.rand(3).tolist()
    return before, inside, torch.rand(3).tolist()


def test_streams_are_equal_along_tp_but_for_the_fork() -> None:
    first, second, other_data = drawn(0, 2), drawn(1, 2), drawn(2, 2)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[2] == second[2]
    assert first[0] != other_data[0]
    for tp in (1, 2, 8):
        assert len({tuple(drawn(rank, tp)[1]) for rank in range(8)}) == 8, "two ranks draw the same"


def test_two_forks_differ() -> None:
    streams = RandomStreams(mesh(0, tp=2))
    draws = []
    for _ in range(2):
        with streams.fork("tensor"):
            draws.append(torch.rand(3).tolist())
    assert draws[0] != draws[1]


def test_ranks_along_tp_draw_the_same_after_a_state_of_another_layout() -> None:
    """Rank 1 of two replicas is no replica where two ranks split tensors."""
    draws = []
    for rank in range(2):
        saving = RandomStreams(mesh(rank))
        saving.seed(1)
        state = saving.state_dict()
        resumed = RandomStreams(mesh(rank, tp=2))
        resumed.seed(1)
        resumed.load_state_dict(state)
        draws.append(torch.rand(3).tolist())
    assert draws[0] == draws[1]


def test_state_goes_on_where_it_was() -> None:
    streams = RandomStreams(mesh(1, tp=2))
    streams.seed(1)
    state = streams.state_dict()

    def some() -> list[float]:
        with streams.fork("tensor"):
            return [*torch.rand(2).tolist(), *torch.rand(2).tolist()]

    first = some()
    assert some() != first
    streams.load_state_dict(state)
    assert some() == first


def test_a_fork_that_fails_leaves_the_default_stream_alone() -> None:
    streams = RandomStreams(mesh(0, tp=2))
    torch.manual_seed(4)
    torch.randint(2**62, ())
    expected = torch.rand(1)
    torch.manual_seed(4)
    with pytest.raises(ZeroDivisionError), streams.fork("tensor"):
        _ = torch.rand(1), 1 // 0
    assert torch.equal(torch.rand(1), expected)


def test_unknown_stream() -> None:
    with pytest.raises(LayoutError, match=r"unknown random stream 'tensr'.*Did you mean 'tensor'"):
        RandomStreams(ParallelMesh()).fork("tensr").__enter__()


def masks() -> dict[str, list[list[float]]]:
    """What each rank's dropout lets through."""
    shared = SharedState(ParallelMesh(2, dist.get_rank(), tp=2))
    sequence = SharedState(ParallelMesh(2, dist.get_rank(), tp=2), sequence_parallel=True)
    torch.manual_seed(0)
    ones = torch.ones(20)
    return {
        "common": ParallelDropout(0.5, shared)(ones).tolist(),
        "sequence": ParallelDropout(0.5, sequence)(ones).tolist(),
        "split": ParallelDropout(0.5, shared, split=True)(ones).tolist(),
        "own": OwnStream(nn.Dropout(0.5), shared)(ones).tolist(),
        "evaluated": ParallelDropout(0.5, shared, split=True).eval()(ones).tolist(),
        "after": torch.rand(2).tolist(),
    }


def test_dropout_masks() -> None:
    first, second = run(masks, 2)
    equal = {name for name in first if first[name] == second[name]}
    assert equal == {"common", "evaluated", "after"}
    assert set(first["common"]) == {0.0, 2.0}
    assert set(first["evaluated"]) == {1.0}


def recomputed(sequence_parallel: bool) -> tuple[bool, bool]:
    """Gradients with and without activation recompute, under dropout everywhere."""
    grid = ParallelMesh(2, dist.get_rank(), tp=2)
    config = GPTConfig(
        num_layers=2,
        hidden_size=8,
        num_heads=2,
        vocab_size=11,
        max_sequence_length=16,
        dropout=DropoutConfig(hidden=0.3, attention=0.3, embedding=0.3),
    )
    with torch.device("meta"):
        model = GPT(config)
    specs = parallelize(model, gpt_plan(model), grid, sequence_parallel=sequence_parallel)
    materialize(model, "cpu")
    initialize(model, specs, 0)
    assert isinstance(model.layers["0"].attention.inner, OwnStream)
    assert isinstance(model.layers["0"].attention.inner.module, InnerAttention)
    sequences = PackedSequences.of_uniform(2, 4)
    tokens = torch.arange(8)
    results = []
    for recompute in (False, True, False):
        model.zero_grad()
        RandomStreams(grid).seed(len(results) // 2)
        hidden = model.embed(tokens, sequences.positions)
        context = model.context(sequences, hidden.dtype)
        for layer in model.layers.values():
            hidden = checkpoint(layer, hidden, context, use_reentrant=False) if recompute else layer(hidden, context)
        model.head(hidden, tokens).sum().backward()
        results.append({name: p.grad.clone() for name, p in model.named_parameters()})
    same = all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    other = any(not torch.equal(results[0][name], results[2][name]) for name in results[0])
    return same, other


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_is_the_same_when_activations_are_recomputed(sequence_parallel: bool) -> None:
    assert run(recomputed, 2, sequence_parallel) == [(True, True)] * 2


def test_no_dropout_needs_no_stream() -> None:
    grid = ParallelMesh(2, 0, tp=2)
    model = GPT(GPTConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=11, max_sequence_length=16))
    parallelize(model, gpt_plan(model), grid)
    assert isinstance(model.layers["0"].attention.inner, InnerAttention)
