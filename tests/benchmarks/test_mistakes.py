"""The benchmark of typical mistakes judges answers; what it times is not tested."""

from dataclasses import replace

from benchmarks.mistakes import FILES, MISTAKES, SCREEN, Row, measure, table

GOOD = Row("a", "fit", 2, 3, 0.1, 0.1, "megalight fit: error: ...")


def test_an_answer_is_an_error_on_one_screen():
    assert GOOD.good
    for change in ({"code": 0}, {"code": 1}, {"lines": SCREEN + 1}, {"lines": 0}, {"first": "Traceback"}):
        assert not replace(GOOD, **change).good


def test_slow_answers_are_named():
    assert "None takes 12" in table([GOOD])
    assert "Above 12 CPU seconds: a" in table([GOOD, replace(GOOD, cpu_seconds=13.0)])


def test_one_mistake_is_made(tmp_path):
    assert len(MISTAKES) >= 20
    (tmp_path / "r.yaml").write_text(FILES["r.yaml"])
    row = measure("misspelled option", MISTAKES["misspelled option"], tmp_path)
    assert row.good
    assert "max_step" in row.first
