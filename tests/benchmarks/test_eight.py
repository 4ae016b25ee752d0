"""Rows of eight GPUs: their layouts are exact on eight ranks, the page has what is predicted, the script goes on."""

import json
import os
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from benchmarks import eight
from benchmarks.eight import EIGHT, TWINS, bubble_of, measure, predict, table, twin_of
from benchmarks.peers import megalight
from benchmarks.peers.megalight import twin
from benchmarks.rows import ROWS
from megalight.models.gpt.module import GPTModule
from megalight.nn.aux_losses import KeptAuxLosses, collecting
from megalight.nn.init import initialize
from megalight.types import PackedSequences
from tests.strategies.training import Gradients, assert_same_gradients, canonical
from tests.support.interpreters import environment
from tests.support.source import ROOT
from tests.support.workers import run

SMALL = "device=cpu graph=0 hidden=128 ffn=128 heads=8 vocab=256 dim=16 mbs=1"
"""What a row has otherwise here. On a CPU there are no graphs; all its other options stay."""


def small(name):
    step = ROWS[name].step
    experts = {"experts": 16, "topk": 2} if step.experts else {}
    step = step.but(f"{SMALL} layers=3 kv={min(step.kv, 4)} seq={32 * step.cp} micro={min(4, step.micro)}")
    return replace(step, layout="Ett|tL" if step.pp > 1 else None, **experts)


def as_rank(do, *arguments):
    """Do as a rank that torchrun has started. Its own start is in test_bench.py."""
    with patch.dict(os.environ, {"LOCAL_RANK": os.environ["RANK"], "TORCHELASTIC_RUN_ID": "eight"}):
        return do(*arguments)


def trained(step):
    """The reported loss, and the whole model's gradients, of a step in float64."""
    losses, kept = [], Gradients()
    with patch.object(megalight, "TRAINER_PRECISION", {"fp32": "64-true"}):
        megalight.train(
            step, 1, lambda strategy: losses.append(float(strategy.report.loss)), fixed=True, callbacks=[kept]
        )
    return losses[0], kept.first


def of_one_device(step, ranks):
    """The same of the batches of all replicas, from one model."""
    model = megalight.one_device(step).double()
    initialize(model, GPTModule(megalight.config_of(step)).seed, prefix="model.")
    replicas, mean = ranks // step.model_ranks, 0.0
    rows = torch.cat([megalight.share(step, replica, 0) for replica in range(replicas)])
    sequences = PackedSequences.of_uniform(1, step.seq, "cpu")
    for number, row in enumerate(rows):
        megalight.force_routes_of(model, number * replicas // len(rows))
        with collecting(KeptAuxLosses()) as side:
            loss = model(row[:-1], sequences, labels=row[1:]).losses.mean() / len(rows)
        torch.stack([loss, *(value / len(rows) for value in side.values.values())]).sum().backward()
        mean += float(loss.detach())
    return mean, canonical(model, {name: p.grad for name, p in model.named_parameters()})


def marked(name):
    return pytest.param(name, marks=[pytest.mark.full] * (name != "llama3-8b-tp4pp2"))


@pytest.mark.parametrize("name", [marked(name) for name in EIGHT if not name.endswith(("-fp8", "-graph"))])
def test_eight_ranks_train_as_one_device(name):
    step = replace(small(name), precision="fp32")
    loss, gradients = of_one_device(step, 8)
    for found, theirs in run(as_rank, 8, trained, step, timeout=240):
        assert found == pytest.approx(loss, rel=1e-9)
        assert_same_gradients(theirs, gradients)


def checked(step):
    """The check of a row before it is timed."""
    return megalight.Runner().check(step)["twin_losses"]


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in EIGHT if not name.endswith("-graph")])
def test_eight_ranks_pass_the_check_of_their_row(name):
    """In the row's own precision; products in FP8 are emulated."""
    (losses, *others) = run(as_rank, 8, checked, small(name), timeout=240)
    assert all(other == losses for other in others)
    assert losses[-1] < losses[0] - 0.03


def test_the_page_has_the_predictions():
    assert table() in (ROOT / "docs/performance/eight-gpus.md").read_text()


def test_a_row_with_the_layout_of_its_measured_one_keeps_its_figure():
    for name in EIGHT:
        row = ROWS[name]
        known = ROWS[row.like]
        measured = json.loads((ROOT / f"benchmarks/results/{row.like}.json").read_text())["rows"][0]["tflops"]
        assert predict(replace(known, like=row.like)).tflops == pytest.approx(measured)
        assert predict(row).tflops < predict(row).bound
    assert bubble_of(ROWS["llama3-8b-tp4pp2"].step) == pytest.approx(1 / 17)


@pytest.mark.parametrize("name", EIGHT)
def test_twins_of_two_gpus_keep_the_options(name):
    row, two = ROWS[name], twin_of(name)
    assert two.step.model_ranks * (2 // max(two.step.model_ranks, two.step.ep)) in (1, 2)
    changed = {word.split("=")[0] for word in TWINS[name].split()} | {"layout"}
    same = {key: value for key, value in vars(row.step).items() if key not in changed}
    assert same.items() <= vars(two.step).items()
    assert (two.peers, two.environment) == (row.peers, row.environment)


def test_checks_of_deep_rows_leave_memory():
    """Each rank keeps float32 weights, gradients and two moments of the whole narrow model."""
    assert max(16 * twin(ROWS[name].step).weights for name in EIGHT) < 40e9


@pytest.fixture
def _forked(monkeypatch):
    """Processes of rows need no time for imports."""
    for name in ("PATH", "PYTHON_EXEC"):
        monkeypatch.setenv(name, environment()[name])
    monkeypatch.setattr(sys, "executable", environment()["PYTHON_EXEC"])


@pytest.mark.usefixtures("_forked")
def test_what_fails_stops_nothing_else(tmp_path, capsys):
    """Our options are wrong and the first peer refuses them; the row's file tells both, and the next row runs."""
    row = ROWS["tiny-cpu"]
    wrong = replace(row, step=replace(row.step, sharding=("no_such_option:1",)), peers=("hf", "mcore-te"))
    result = measure("wrong", wrong, tmp_path, 100.0)
    assert "no_such_option" in result["rows"][0]["failed"]
    assert "no sharding" in result["rows"][1]["refused"]
    assert json.loads((tmp_path / "wrong.json").read_text()) == result
    right = measure("right", replace(row, step=row.step.but("steps=1")), tmp_path, 100.0)
    assert [found["peer"] for found in right["rows"] if "seconds" in found] == ["megalight", "hf"]
    assert right["rows"][0]["checks"]["twin_difference"] < 1e-4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["right.json", "wrong.json", "wrong.log"]
    said = capsys.readouterr().out
    assert "FAILED megalight" in said
    assert "RESULT hf" in said


def test_a_peer_that_fails_behind_another_runs_alone(tmp_path, monkeypatch):
    calls = []

    def run_peers(row, peers, log, limit):
        calls.append(peers)
        for peer in peers:
            good = peer == "megalight" or len(calls) == 2
            figures = {"seconds": 1.0, "tflops": 1.0, "tokens_per_second": 1.0, "peak_gib": 1.0, "checks": {}}
            yield peer, {"rows": [{"peer": peer, **(figures if good else {"failed": "out of memory"})}]}

    monkeypatch.setattr(eight, "run_peers", run_peers)
    result = measure("row", ROWS["tiny-cpu-dp2"], tmp_path, 10.0)
    assert calls == [["megalight", "fsdp2"], ["fsdp2"]]
    assert all("seconds" in found for found in result["rows"])


def test_rows_without_time_or_with_a_file_are_left(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(eight.bench, "enough", lambda rows: None)
    monkeypatch.setattr(eight, "measure", lambda name, *rest: asked.append(name) or {"rows": [{"seconds": 1.0}]})
    (tmp_path / f"{EIGHT[0]}.json").touch()
    assert eight.run(EIGHT, tmp_path, 2.0, two=False, alone=False) == 1
    assert EIGHT[0] not in asked
    assert EIGHT[1] in asked
    assert "llama3-8b-cp8-256k: not run" in capsys.readouterr().out
    assert eight.run(EIGHT[1:3], tmp_path, 10.0, two=True, alone=True) == 0
    assert asked[-2:] == [f"{name}-two" for name in EIGHT[1:3]]
