"""The benchmark of vision-language models, small: rows, their count of operations, and what it refuses to time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from benchmarks import vlm
from benchmarks.image_text import measure
from benchmarks.image_text.row import Row
from benchmarks.image_text.shapes import shape_of
from benchmarks.in_turn import in_turn
from benchmarks.peers.megalight import Wrong
from megalight.models.vlm.module import Trained, flops_of_images
from tests.support.interpreters import environment
from tests.support.workers import run

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
ONE = [Row(shape, way, "bf16", small=True) for shape in vlm.SHAPES for way in ("megalight", "transformers")]
CROSSED = (ONE[0],)
"""Each shape and each way once; whole test runs have the others, too."""


def test_operations_of_the_shapes_are_counted() -> None:
    shape = shape_of("llava-1.5", 2)
    batch, cuts = shape.batch(0, 2)
    assert (batch.tokens == 32000).sum() == 2 * 576 == 2 * shape.image_tokens()
    assert [len(cut.pixels) for cut in cuts] == [577, 577]
    language = 16 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32064
    tower = 577 * (2 * (23 * 12 * 1024**2 + 588 * 1024) + 4 * 23 * 1024 * 577)
    projector = 577 * (4 * 1024 * 4096 + 6 * 4096**2)
    attention = 6 * 16 * 4096 * 1024
    # Of 1,024 tokens, those before an image token and the last have no loss.
    spared = 577 * 6 * (4096**2 + 3 * 4096 * 11008 + 4096 * 32064)
    row = 1024 * (6 * language + attention) + tower + projector - spared
    assert shape.flops() == pytest.approx(16 * row, rel=2e-3)
    whole = Row("llava-1.5", "megalight", "bf16", gpus=4, trained=True, divisor=1, mbs=4)
    assert whole.passes == Trained()
    language += 16 * (4 * 4096**2 + 3 * 4096 * 11008)
    more = 1024 * (6 * language + 2 * attention) + 3 * tower + 577 * 6 * (1024 * 4096 + 4096**2) - spared
    assert whole.made().flops(whole.passes) == pytest.approx(8 * more, rel=2e-3)
    qwen = shape_of("qwen2.5-vl")
    sizes = [17 * 23, 24 * 36, 16 * 16]
    assert [cut.features for cut in qwen.batch(0, 1)[1]] == sizes
    assert qwen.flops() > 8 * flops_of_images(qwen.config, [4 * size for size in sizes]) / 3


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=[pytest.mark.full] * (row not in CROSSED)) for row in ONE]
)
def test_a_row_on_the_cpu(row: Row) -> None:
    _right(measure.measure(row))


@pytest.mark.full
def test_a_row_with_past_scales_and_one_micro_batch() -> None:
    found = measure.measure(Row("llava-1.5", "megalight", "fp8", small=True, recipe="delayed", micro=1))
    assert found["micro_batches"] == 1
    assert 0 < found["checks"]["twin_difference"] < measure.TOLERANCE["fp8"]


@pytest.mark.full
def test_a_row_that_computes_activations_again() -> None:
    row = Row("llava-1.5", "megalight", "bf16", small=True, micro=1, recompute=("*_norm", "mlp.act"))
    assert row.name == "llava-1.5, megalight bf16, micro=1, recompute=*_norm+mlp.act"
    _right(measure.measure(row))


def _right(found: dict[str, Any]) -> None:
    assert found["checks"]["twin_difference"] < measure.TOLERANCE["fp32"]
    losses = found["checks"]["twin_losses"]
    assert losses[-1] < 0.999 * losses[0]  # it learns, so that steps matter
    assert found["seconds"] > 0
    assert found["tflops"] * found["seconds"] > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "level", "trained"),
    [
        ("llava-1.5", "optim_grads_params", True),
        ("qwen2.5-vl", "optim_grads_params", True),
        ("llava-1.5", "optim", False),
        ("qwen2.5-vl", "optim", True),
        ("qwen2.5-vl", "optim_grads", False),
    ],
)
def test_fsdp2_on_two_ranks_has_the_losses_of_the_global_batch(shape: str, level: str, trained: bool) -> None:
    row = Row(shape, "transformers", "bf16", 2, level, trained=trained, small=True)
    for found in run(measure.measure, 2, row):
        _right(found)


def _saved_by_the_first() -> str:
    def save(folder: str) -> None:  # as transformers 5.17 does
        if dist.get_rank() == 0:
            Path(folder, "config.json").write_text("{}", encoding="utf-8")

    with measure.folder_of_all(2, save) as folder:
        assert Path(folder, "config.json").exists()
    return folder


def test_all_ranks_read_what_the_first_one_saved() -> None:
    first, second = run(_saved_by_the_first, 2)
    assert first == second
    assert not Path(first).exists()


@pytest.mark.full
def test_rows_in_processes(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert vlm.main([str(path), "--small", "--rows", "llava-1.5, megalight fp8", "llava-1.5, transformers"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["row"] for row in rows] == ["llava-1.5, megalight fp8", "llava-1.5, transformers bf16"]
    assert "x transformers" in vlm.table(rows)


@pytest.mark.full
def test_rows_of_two_ranks(tmp_path: Path) -> None:
    path, level = tmp_path / "result.json", "optim_grads_params"
    options = ["--small", "--gpus", "2", "--limit", "280", "--sharding", "prefetch:2", "--breakdown"]
    asked = [f"qwen2.5-vl, transformers bf16, {level}", "megalight fp8", "megalight bf16"]
    assert vlm.main([str(path), *options, "--rows", *asked]) == 0
    peer, *ours = json.loads(path.read_text())["rows"]
    assert [row["row"].split(",")[0] for row in ours] == list(vlm.SHAPES) * 2
    assert peer["sharding"] == [] != ours[0]["sharding"]
    assert [len(row.get("breakdown", ())) for row in (peer, *ours)] == [0, 2, 2, 2, 2]
    for row in (peer, *ours):
        assert (row["gpus"], row["tower"], len(row["peak_gib"])) == (2, "trained", 2)
        assert row["checks"]["twin_difference"] < measure.TOLERANCE["fp8" if "fp8" in row["row"] else "fp32"]
    assert not path.with_suffix(".log").exists()


def test_rows_are_asked_for_by_name_or_word_and_in_order() -> None:
    words = ["result.json", "--gpus", "2", "--level", "optim", "optim_grads", "--mbs", "3", "--rows"]
    words += ["qwen2.5-vl, megalight bf16, optim", "transformers", "qwen2.5-vl, megalight bf16, optim"]
    rows = vlm.rows_of(vlm.arguments().parse_args(words))
    assert [(row.shape, row.way, row.level) for row in rows] == [
        ("qwen2.5-vl", "megalight", "optim"),
        ("llava-1.5", "transformers", "optim"),
        ("qwen2.5-vl", "transformers", "optim"),
        ("llava-1.5", "transformers", "optim_grads"),
        ("qwen2.5-vl", "transformers", "optim_grads"),
    ]
    assert {(row.gpus, row.divisor, row.trained, row.mbs) for row in rows} == {(2, 1, True, 3)}
    assert {row.graph for row in rows} == {""}
    one = vlm.arguments().parse_args(["result.json", "--graph", "iteration", "--rows", "llava-1.5"])
    assert [row.name for row in vlm.rows_of(one)] == [
        "llava-1.5, megalight bf16",
        "llava-1.5, megalight bf16, graph=iteration",
        "llava-1.5, megalight fp8",
        "llava-1.5, megalight fp8, graph=iteration",
        "llava-1.5, transformers bf16",
    ]
    words = ["result.json", "--recipe", "delayed", "--micro", "1", "--rows", "llava-1.5, megalight fp8"]
    rows = vlm.rows_of(vlm.arguments().parse_args(words))
    assert [row.name for row in rows] == [f"llava-1.5, megalight fp8{recipe}, micro=1" for recipe in ("", " delayed")]
    again = vlm.arguments().parse_args(["result.json", "--recompute", "mlp.act", "--rows", "llava-1.5, megalight b"])
    assert [row.recompute for row in vlm.rows_of(again)] == [(), ("mlp.act",)]
    words[-1] = "fp8 delayed"
    rows = vlm.rows_of(vlm.arguments().parse_args(words))
    assert [row.name for row in rows] == [f"{shape}, megalight fp8 delayed, micro=1" for shape in vlm.SHAPES]
    assert [(row.recipe, row.made().rows) for row in rows] == [("delayed", 8), ("delayed", 4)]


def test_steps_of_other_micro_batches_have_as_many_rows() -> None:
    words = ["result.json", "--gpus", "2", "--micro", "2", "1", "--rows", "megalight bf16"]
    rows = vlm.rows_of(vlm.arguments().parse_args(words))
    assert [(row.name.split(", ")[-1], row.made().mbs, row.made().rows) for row in rows] == [
        ("optim_grads_params", 8, 16),
        ("micro=1", 16, 16),
        ("optim_grads_params", 2, 4),
        ("micro=1", 4, 4),
    ]
    rows = vlm.rows_of(vlm.arguments().parse_args([*words, "llava-1.5", "--mbs", "3", "--tower", "frozen"]))
    assert [(row.made().mbs, row.made().rows) for row in rows[:2]] == [(3, 6), (6, 6)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--level", "optim"], "--level says what several ranks shard"),
        (["--gpus", "2", "--sharding", "gather:auto"], "gather"),
        (["--small", "--graph", "layer"], "no CUDA graphs on the CPU"),
        (["--micro", "0"], "at least one micro-batch"),
        (["--micro", "2", "3"], "must divide the first one"),
        (["--gpus", "2", "--sharding", "gathers:copied"], "gathers='copied'"),
    ],
)
def test_what_does_not_act_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        vlm.main(["result.json", "--small", *words])
    assert message in capsys.readouterr().err


def test_graphs_that_cannot_be_are_refused_before_a_row_runs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["result.json", "--gpus", "2", "--level", "optim_grads", "--graph", "iteration", "--rows"]
    with pytest.raises(SystemExit):
        vlm.main([*words, "graph"])
    message = "bf16, optim_grads, graph=iteration': whole steps are recorded at level 'optim' only"
    assert message in capsys.readouterr().err


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object, **options: object) -> None:
        arguments[3](mock.Mock(report=mock.Mock(loss=1.0)))  # type: ignore[operator]

    row = Row("llava-1.5", "megalight", "bf16", small=True)
    monkeypatch.setattr(measure, "train_ours", wrong)
    monkeypatch.setattr(measure, "CHECKED_STEPS", 1)
    with pytest.raises(Wrong):
        measure.check(row)


RANK = """
import json, os, sys, time
from pathlib import Path
from benchmarks.in_turn import add
for row in json.loads(Path(sys.argv[1]).read_text()):
    if row["name"] == "dies":
        raise RuntimeError("no memory")
    if row["name"] == "hangs":
        Path(os.environ["ASLEEP"]).write_text(str(os.getpid()))
        time.sleep(1000)
    add(Path(sys.argv[2]), row)
"""


def test_rows_behind_one_that_fails_or_hangs_run_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():  # on a busy machine, an interpreter may take seconds to start
        monkeypatch.setenv(name, value)
    log, names = tmp_path / "result.log", ["a", "dies", "b", "hangs", "c"]
    now, asleep = 0.0, tmp_path / "asleep"
    monkeypatch.setenv("ASLEEP", str(asleep))

    def look_again(seconds: float) -> None:
        """Time passes while a row hangs, and not while an interpreter starts."""
        nonlocal now
        time.sleep(0.01)
        now += 100 * (asleep.exists() and Path("/proc", asleep.read_text()).exists())

    with monkeypatch.context() as patch:
        patch.setattr("benchmarks.in_turn.time", SimpleNamespace(sleep=look_again, monotonic=lambda: now))
        found = list(in_turn(["python", "-c", RANK], [{"name": name} for name in names], log, 90.0))
    assert [found[0], found[2], found[4]] == [{"name": name} for name in "abc"]
    assert found[1].startswith("exit code 1\n")
    assert "no memory" in found[1]
    assert found[3].startswith("not done after 90 s")
    assert "no memory" in log.read_text()
    assert list(in_turn(["python", "-c", RANK], [{"name": "a"}], log, 240.0)) == [{"name": "a"}]
    assert not log.exists()
