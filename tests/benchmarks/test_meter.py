import pytest

from benchmarks import meter
from benchmarks.meter import Meter
from benchmarks.step import Step


@pytest.mark.parametrize(("quiet", "rank", "lines"), [(0.0, "0", 6), (0.0, "1", 0), (1000.0, "0", 0)])
def test_the_first_rank_says_how_far_a_slow_run_is(
    quiet: float, rank: str, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meter, "QUIET", quiet)
    monkeypatch.setenv("RANK", rank)
    run = Meter(Step(device="cpu", steps=2, warmup=1))
    run.start()
    for _ in range(run.total):
        run.tick()
    found = capsys.readouterr().out.splitlines()
    assert len(found) == lines
    assert not found or found[-1].startswith("step 6 of 6, 0 s ")
    assert len(run.seconds()) == 2
