"""Recorded steps of models that are divided over ranks: texts are those of one device, and ranks replay together."""

from __future__ import annotations

import socket
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import megalight
from megalight.inference import DynamicEngine, ParallelGPT, SamplingParams, generate
from megalight.inference.batch_dimensions import InferenceBatchDimensions
from megalight.nn.init import initialize
from megalight.parallel.peers import memory, one_shot
from tests.inference.test_graphs import recording
from tests.parallel.expert.model import build
from tests.parallel.graphs.tape import Tape
from tests.support.workers import run

D = InferenceBatchDimensions
GREEDY = SamplingParams(temperature=0)
REQUESTS = [([[5, 6, 7], [8]], 5), ([[9, 10, 11, 12, 13], [4, 3], [2]], 9)]


def _replica(degrees: dict[str, Any], failing: int | None) -> Any:
    split = megalight.parallelize(build().double().to("meta"), megalight.Layout(**degrees), seed=3, fill=True)
    model, tape = ParallelGPT(split), Tape()
    engine = DynamicEngine(model, num_blocks=20, block_size=3, max_sequences=4, step_tokens=6)
    tape.fail_at = failing if split.mesh.global_rank == 1 else None
    recording(engine, [D(8, 4, 0), D(4, 0, 4), D(2, 0, 2)], tape)
    replica = split.mesh.rank("dp")
    prompts, count = REQUESTS[replica]
    engine.create_cuda_graphs()
    texts = []
    for turn in range(2):
        for number, prompt in enumerate(prompts):
            # Those that are scored run without graphs, on all ranks.
            scored = failing == 3 and replica == number
            engine.add(prompt, max_new_tokens=count, sampling_params=GREEDY, prompt_log_probs=scored)
        texts.append([each.tokens for each in engine.run().values()])
        if turn == replica == 0:  # graphs of one replica are gone
            engine.suspend()
            engine.resume()
    replays = sum(tape.replays for tape in tape.tapes)
    return replica, texts, engine.step_log.graph_uses, engine.step_log.steps, replays


EP, PP = {"expert_parallel": 2}, {"pipeline_parallel": 2}
TP = {"tensor_parallel": 2, "sequence_parallel": True}
ALL = {D(8, 4, 0), D(4, 0, 4), D(2, 0, 2)}


@pytest.mark.parametrize(("degrees", "failing"), [(EP, None), (EP, 3), (TP, 1), (PP, None), (PP, 1)], ids=str)
def test_ranks_replay_together(degrees: dict[str, Any], failing: int | None) -> None:
    """``failing``: the number of a recording that fails on one rank. Then no rank replays it."""
    whole = build().double()
    initialize(whole, 3, "model.")
    results = run(_replica, 2, degrees, failing)
    for replica, texts, uses, steps, _ in results:
        prompts, count = REQUESTS[replica]
        expected = [generate(whole, [prompt], max_new_tokens=count, temperature=0)[0] for prompt in prompts]
        assert texts == [expected] * 2
        missing = {None: set(), 3: {D(2, 0, 2)}, 1: {D(8, 4, 0)}}[failing]
        assert uses
        assert {*uses} <= ALL - missing
        assert (uses.total() == steps) == (failing is None)
    assert len({replays for *_, replays in results}) == 1


def _on_two_hosts() -> Any:
    """As on GPUs of two hosts, which have memory that others on their host could read."""
    rank, asked = dist.get_rank(), list[str | None]()

    def unreachable(group: dist.ProcessGroup) -> str | None:
        asked.append(memory.unreachable.__wrapped__(group))
        return asked[-1]

    with (
        patch.object(one_shot, "why_not", lambda device: None),
        patch.object(one_shot, "unreachable", unreachable),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(socket, "gethostname", lambda: f"host{rank}"),
    ):
        return _replica(EP, None), asked


def test_replicas_on_two_hosts_exchange_tokens_by_collectives() -> None:
    whole = build().double()
    initialize(whole, 3, "model.")
    for (replica, texts, uses, steps, _), asked in run(_on_two_hosts, 2):
        prompts, count = REQUESTS[replica]
        expected = [generate(whole, [prompt], max_new_tokens=count, temperature=0)[0] for prompt in prompts]
        assert texts == [expected] * 2
        assert uses.total() == steps
        assert {*asked} == {"needs all 2 ranks on one host, and they are on 2"}
