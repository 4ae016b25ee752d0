"""Rows as data, and the steps behind them."""

import argparse

import pytest
import torch

from benchmarks.peers import PEERS, load, megatron_core
from benchmarks.rows import ROWS
from benchmarks.step import Step, only_of


def parsed(words):
    parser = argparse.ArgumentParser()
    Step.add_arguments(parser)
    return Step.of(parser.parse_args(words))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_survives_the_command_line(name):
    row = ROWS[name]
    assert parsed(row.step.words()) == row.step
    assert row.gpus % row.step.model_ranks == 0
    assert set(row.peers) | set(row.figures) <= set(PEERS)
    assert row.against is None or row.against[0] in ROWS
    assert row.step.heads % row.step.kv == 0
    assert row.step.kv % row.step.tp == 0


def test_no_two_rows_are_the_same():
    assert len({(row.step, row.gpus) for row in ROWS.values()}) == len(ROWS)


def test_changes_as_text():
    step = Step().but("pp=4 layout=Et|t*3|tL recompute=mlp.act,mlp_norm graph=1")
    assert (step.pp, step.layout, step.recompute, step.graph) == (4, "Et|t*3|tL", ("mlp.act", "mlp_norm"), True)
    assert step.but("recompute=").recompute == ()
    with pytest.raises(SystemExit, match="pq"):
        Step().but("pq=4")


@pytest.mark.parametrize(
    ("peer", "change", "reason"),
    [
        ("hf", "tp=2", "no tp"),
        ("hf", "precision=fp8", "no fp8"),
        ("fsdp2", "cp=2 kind=ring", "no cp, kind"),
        ("mfsdp", "", "megatron-fsdp is not installed"),
        ("mcore-te", "", "megatron-core is not installed"),
        ("megalight", "tp=3", "replicas of 3"),
        ("megalight", "backends=norm:apex", "apex is not installed"),
    ],
)
def test_peers_say_why_they_cannot(peer, change, reason):
    assert reason in load(peer).why_not(Step().but(change))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("pp=4 schedule=zero_bubble", "no schedule 'zero_bubble'"),
        ("cp=4 kind=all_to_all_ring", "one of the kinds auto, ring, all_gather, all_to_all"),
        ("pp=4 vpp=2", "need a layout"),
        ("graph=1 sharding=gathers:auto", None),
        ("sharding=gathers:auto,gradient_dtype:bfloat16", "no sharding"),
        ("overlap=symmetric moments=bfloat16", "no moments"),
        ("cp=4 kind=ring recompute=mlp", None),
        ("pp=4 layout=Et*8|t*9|t*9|t*6L", None),
    ],
)
def test_layouts_of_megatron_core(change, reason, monkeypatch):
    monkeypatch.setattr(megatron_core, "has", lambda package: True)
    found = megatron_core.Runner(te=True).why_not(Step().but(change))
    assert found is None if reason is None else reason in found


def test_chunks_of_megatron_core():
    """A rank of the interleaved pipeline has four, and one without chunks has one."""
    assert [megatron_core.chunks_of(ROWS[f"llama3-8b-pp4{more}"].step) for more in ("", "-vpp4")] == [1, 4]


def test_tokens_of_megatron_core_are_shared_as_its_attention_expects():
    shares = [megatron_core.share(torch.arange(16)[None], 4, rank).flatten().tolist() for rank in range(4)]
    assert shares == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


def test_what_a_runner_can_do_is_not_held_against_it():
    assert only_of(Step(tp=2), ("tp",)) is None
    assert load("hf").why_not(Step()) is None
