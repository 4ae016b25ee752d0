"""``megalight evaluate``: a table, a file of JSON, and one message for each mistake."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megalight.cli.main import main
from tests.support.workers import run

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def words(folders: tuple[Path, Path], *more: str) -> list[str]:
    return ["evaluate", str(folders[0]), "--include-path", str(folders[1]), *more]


def test_prints_a_table_and_writes_json(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results" / "scores.json"
    asked = words(folders, "--tasks", "colors,answers", "--limit", "4", "-f", "1", "-o", str(out), "--log-samples")
    assert main([*asked, "--gen-kwargs", "max_gen_toks=3", "--batch-tokens", "16"]) == 0
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert table[0][:5] == ["Tasks", "Version", "Filter", "n-shot", "Metric"]
    results = json.loads(out.read_text())
    rows = {(row[0], row[4]): row for row in table[2:]}
    assert float(rows["colors", "acc"][6]) == pytest.approx(results["results"]["colors"]["acc,none"], abs=1e-4)
    assert results["n-samples"]["answers"] == {"original": 7, "effective": 4}
    assert results["n-shot"]["colors"] == 1
    assert results["config"]["model_args"] == {"checkpoint": str(folders[0])}
    assert len(results["samples"]["answers"]) == 4


def _on_ranks(words: list[str], out: Path) -> int:
    return main([*words, "-o", str(out)])


@pytest.mark.full
def test_replicas_share_the_questions(folders: tuple[Path, Path], tmp_path: Path) -> None:
    asked = words(folders, "--tasks", "endings", "--device", "cpu", "--bootstrap-iters", "0")
    assert run(_on_ranks, 2, asked, tmp_path / "two.json") == [0, 0]
    assert main([*asked, "-o", str(tmp_path / "one.json")]) == 0
    one, two = (json.loads((tmp_path / name).read_text())["results"] for name in ("one.json", "two.json"))
    assert two["endings"]["perplexity,none"] == pytest.approx(one["endings"]["perplexity,none"], rel=1e-6)


def test_mistakes(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megalight.evaluation import lm as runs

    monkeypatch.setattr(runs, "_indexed", lambda folder, **_: runs.Tasks(include_path=folder, include_defaults=False))
    for given, message in (
        (["--tasks", "colorss"], "there is no task 'colorss'. Did you mean 'colors'?"),
        ([], "a model and its tasks are expected"),
        (["--tasks", "colors", "--log-samples"], "--log-samples writes to the file of --out"),
        (["--tasks", "colors", "--chat-template", "none.jinja"], "none.jinja' cannot be read"),
        (["--tasks", "colors", "--tensor-parallel", "2"], "need 2 processes, or a multiple, and there are 1"),
        (["--tasks", "answers", "--gen-kwargs", "greedy"], "write key=value,key=value"),
    ):
        assert main(words(folders, *given)) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(words(folders, "--tasks", "colors")) == 2
    assert "pip install 'megalight[evaluate]'" in " ".join(capsys.readouterr().err.split())
