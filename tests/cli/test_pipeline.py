from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalight.cli.main import main

BUBBLES = [("1f1b", 38), ("zero_bubble", 12), ("combined", 38)]
"""Of 4 ranks and 8 micro-batches: ``3 / 8``, and a third of it where gradients of weights fill in."""


def doctor(*words: str) -> int:
    return main(["doctor", *words])


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def test_a_layout_string_is_shown_with_its_bubble_and_its_timeline(capsys) -> None:
    assert doctor("--layout", "Et|(tt|)*2tL", "--micro-batches", "4") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "6 layers on pp=4, vpp=1: Et|tt|tt|tL",
        "rank 0  E 0",
        "rank 1  1-2",
        "rank 2  3-4",
        "rank 3  5 L",
    ]
    text = "\n".join(lines)
    assert "1f1b          bubble 75.0% of the work, activations of at most 4 chunks in memory" in text
    assert "zero_bubble   bubble 25.0% of the work, activations of at most 4 chunks in memory" in text
    assert "interleaved   it interleaves the chunks of a rank, but vpp=1" in text
    assert lines[-5] == "1f1b:"
    assert lines[-1].startswith("rank 3  .  .  .  F0 B0 =  F1")


def test_chunks_come_from_the_string(capsys) -> None:
    words = ["--layout", "E|t|t|tL", "--pipeline-parallel", "2", "--schedule", "zero_bubble", "--micro-batches", "6"]
    assert doctor(*words) == 0
    text = capsys.readouterr().out
    assert (
        "3 layers on pp=2, vpp=2: E|t|t|tL\n        chunk 0  chunk 1\nrank 0  E        1\nrank 1  0        2 L" in text
    )
    assert f"interleaved   bubble {1 / 12:.1%} of the work, activations of at most 5 chunks in memory" in text
    assert f"zero_bubble   bubble {1 / 36:.1%} of the work" in text
    assert "\nzero_bubble:\nrank 0  F0.0" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_head_that_weighs_layers(capsys) -> None:
    assert doctor("--layout", "Ettt|ttt|t*3|tL", "--micro-batches", "8", "--head-cost", "2") == 0
    text = capsys.readouterr().out
    takes = f"as long as {3 * 33:.1f} forwards of a layer"
    assert f"1f1b          bubble {3 / 8:.1%} of the work, {takes}, activations" in text
    assert doctor("--layout", "Ett|ttt|t*3|ttL", "--micro-batches", "8", "--head-cost", "2.5") == 0
    worse = capsys.readouterr().out
    assert float(worse.split("work, as long as ")[1].split()[0]) > 3 * 33


def test_splits_by_numbers(capsys) -> None:
    assert doctor("--layers", "8", "--pipeline-parallel", "2", "--virtual-pipeline", "2", "--group-size", "3") == 0
    assert "8 layers on pp=2, vpp=2: Ett|tt|tt|ttL\n" in capsys.readouterr().out
    assert doctor("--layers", "7", "--pipeline-parallel", "4", "--first-layers", "1", "--micro-batches", "3") == 0
    text = capsys.readouterr().out
    assert "vpp=1: Et|tt|tt|ttL\n" in text
    assert "3 micro-batches in a pipeline of 4 ranks: the bubble is 100%" in text
    assert doctor("--layers", "6", "--pipeline-parallel", "2", "--count-embedding", "--count-loss") == 0
    assert "vpp=1: Ettt|tttL\n" in capsys.readouterr().out


def test_a_mesh_and_its_stages_together(capsys) -> None:
    assert doctor("--layout", "tp=2,pp=2", "--layers", "2") == 0
    text = capsys.readouterr().out
    assert ["3", "1", "0", "0", "1"] in [line.split() for line in text.splitlines()]
    assert "2 layers on pp=2, vpp=1: Et|tL" in text


def test_an_image_has_a_panel_for_each_schedule_that_trains(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    image = tmp_path / "new" / "step.svg"
    words = ["--layers", "8", "--pipeline-parallel", "4", "--micro-batches", "8", "--output", str(image)]
    assert doctor(*words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(image)
    text = image.read_text()
    # A number per action: forward and backward of 8 micro-batches on 4 ranks, twice with two parts, once with three.
    numbers = re.findall(r"font-size: 6px[^>]*>(\d)</text>", text)
    assert sorted(numbers) == sorted("01234567" * 4 * (2 + 3 + 2))
    titles = re.findall(r">([\w ]+: bubble \d+% of the work)<", text)
    assert titles == [f"{name}: bubble {share}% of the work" for name, share in BUBBLES]
    assert doctor(*words[:-2], "--output", str(tmp_path / "again.svg")) == 0
    assert (tmp_path / "again.svg").read_text() == text


def test_an_image_needs_stages(tmp_path: Path, capsys) -> None:
    image = tmp_path / "step.svg"
    assert doctor("--layout", "tp=2,dp=2", "--output", str(image)) == 2
    assert "add --layers N" in capsys.readouterr().err
    assert not image.exists()


def test_many_ranks_are_not_drawn(capsys) -> None:
    assert doctor("--layers", "128", "--pipeline-parallel", "64", "--micro-batches", "64") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 16
    assert "rank 63  126-127 L" in lines


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--layout", "Et|xL"], ["character 4", "'x' is unknown"]),
        (["--layout", "Et|tL", "--layers", "3"], ["names 2 layers 't'", "1 too few", "rank 1  1 L"]),
        (["--layout", "Et|tL", "--pipeline-parallel", "4"], ["2 stages, which is no multiple of pp=4"]),
        (["--layout", "Et|tL", "--first-layers", "1"], ["already says what each stage holds"]),
        (["--layout", "pp=2", "--layers", "4", "--pipeline-parallel", "4"], ["contradicts --layout with pp=2"]),
        (["--layers", "9", "--pipeline-parallel", "4"], ["9 layers do not divide", "'Et|ttt|ttt|ttL'"]),
        (["--layers", "9"], ["--layers=9", "add --pipeline-parallel"]),
        (["--pipeline-parallel", "2"], ["number of layers is missing", "add --layers"]),
        (["--layers", "8", "--pipeline-parallel", "4", "--first-layers", "2", "--count-loss"], ["cannot be combined"]),
        (["--layout", "Et|tL", "--schedule", "gpipe"], ["'gpipe'", "1f1b"]),
        (["--layout", "Et|tL", "--head-cost", "-1"], ["--head-cost is -1.0", "0 or more"]),
        (["--layout", "Et|tL", "--micro-batches", "0"], ["micro_batches=0"]),
    ],
)
def test_errors_say_what_to_do(words: list[str], parts: list[str], capsys) -> None:
    assert doctor(*words) == 2
    text = " ".join(capsys.readouterr().err.split())
    for part in parts:
        assert " ".join(part.split()) in text, text
