"""The performance page is what the results say."""

import json

import pytest

from benchmarks import render
from benchmarks.rows import ROWS
from megalight.imports import has


def test_the_pages_are_up_to_date():
    for path, text in render.pages(render.collect()).items():
        assert path.read_text(encoding="utf-8") == text, "run: python benchmarks/render.py"


def test_the_plots_are_up_to_date():
    found = render.collect()
    plots = {
        render.PLOT: render.points(found),
        render.README_PLOT: render.headline_points(found),
        render.PARTS_PLOT: render.shares(found),
    }
    for plot, shown in plots.items():
        assert render.digest(shown) in plot.read_text(encoding="utf-8"), "run: python benchmarks/render.py"


def test_headlines_name_every_row():
    lines = render.headlines(render.collect()).splitlines()[2:]
    assert len(lines) == len(render.HEADLINES)
    assert not [line for line in lines if "the same," in line]


def write(folder, name, rows, **shape):
    record = {"device": "NVIDIA H200", "gpus": 1, "shape": shape, "rows": rows}
    (folder / name).write_text(json.dumps(record))


def measured(peer, tflops, **more):
    return {"peer": peer, "seconds": 1.0, "tflops": tflops, "tokens_per_second": 1e4, "peak_gib": 80.0, **more}


def test_results_find_their_rows(tmp_path):
    write(tmp_path, "a.json", [measured("megalight", 500), measured("megalight precision=fp8", 800)], layers=16)
    write(
        tmp_path,
        "8b-16l-bf16.json",
        [measured("megalight", 580), measured("hf-compile", 490)],
        layers=16,
        steps=3,
        backends=[],
        recompute=[],
    )
    write(tmp_path, "other.json", [measured("megalight", 100)], layers=17)
    (tmp_path / "another-kind.json").write_text(json.dumps({"rows": [{"op": "norm"}], "device": "x"}))
    found = render.collect(tmp_path)
    assert set(found) == {"8b-16l-bf16", "8b-16l-fp8"}
    assert found["8b-16l-bf16"]["file"] == "8b-16l-bf16.json"
    assert {peer: row["tflops"] for peer, row in found["8b-16l-bf16"]["peers"].items()} == {
        "megalight": 580,
        "hf-compile": 490,
    }
    first, second = render.page_table(found).splitlines()[2:]
    cells = [cell.strip() for cell in first.split("|")[1:-1]]
    assert cells[:12] == [
        "`8b-16l-bf16`", "1 x H200", "1.000", "", "580", "10,000", "80.0", "596", "97%", "595: 2.5% short", "",
        "hf-compile 490 (80.0 GiB): 1.18 x",
    ]  # fmt: skip
    assert "| 890: 10.1% short |" in second
    assert "`8b-8l-8k-fp8`" in render.missing(found)
    assert "`8b-16l-bf16`" not in render.missing(found)


def test_parts_of_ranks_are_averaged():
    ranks = [
        {"gemm": 0.5, "attention": 0.1, "optimizer": 0.1, "other": 0.1, "exposed": 0.1, "idle": 0.05,
         "computing": 0.8, "step": 0.95, "seconds": 1.0, "accounted": 0.95},
        {"gemm": 1.4, "attention": 0.2, "optimizer": 0.2, "other": 0.0, "exposed": 0.0, "idle": 0.2,
         "computing": 1.8, "step": 2.0, "seconds": 2.0, "accounted": 1.0},
    ]  # fmt: skip
    shares = render.parts({"breakdown_by_rank": ranks})
    assert shares["gemm"] == pytest.approx(0.6)
    assert shares["idle"] == pytest.approx(0.075)
    assert shares["accounted"] == 0.95
    earlier = [{"step": 2.0, "computing": 1.5, "communicating": 1.0, "exposed": 0.4, "idle": 0.1}]
    assert render.parts({"breakdown_by_rank": earlier}) == {"exposed": 0.2, "computing": 0.75, "idle": 0.05}
    assert render.parts({"breakdown_by_rank": [{}]}) == {}


def test_an_aim_that_is_another_row():
    row = ROWS["125m-graph"]
    found = {"125m": {"peers": {"megalight": {"tflops": 100.0}}}}
    assert render.aim_of(row, 125, render.rate_of(found, row)) == "1.25 x `125m` = 125: met"
    assert render.aim_of(row, 100, render.rate_of(found, row)) == "1.25 x `125m` = 125: 20.0% short"
    assert render.aim_of(row, 100, render.rate_of({}, row)) == "1.25 x `125m`"


def test_a_run_is_told_of_its_aim(tmp_path):
    record = {"device": "NVIDIA H200", "rows": [measured("megalight", 600)]}
    assert "aim 595: met" in render.verdict(ROWS["8b-16l-bf16"], record, tmp_path)
    assert "aim 1.25 x `125m`;" in render.verdict(ROWS["125m-graph"], record, tmp_path).replace("\n", ";")


@pytest.mark.skipif(not has("matplotlib"), reason="matplotlib is not installed")
def test_the_plot_says_of_what_it_is(tmp_path):
    points = render.points(render.collect())[:2]
    render.plot(points, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert render.digest(points) in text
    assert render.digest(points[:1]) not in text
    assert "8b-16l-bf16" in text
