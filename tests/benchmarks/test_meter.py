import pytest
import torch

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


def test_the_profiled_step_is_one_in_a_row() -> None:
    run = Meter(Step(device="cpu", steps=2, warmup=1), profiled=True)
    work = torch.randn(64, 64)
    run.start()
    for tick in range(run.total):
        for _ in range(5 if tick == run.total - 1 else 50):
            work @ work
        run.tick()
    run.close()
    (_, found), *_ = run.ranks
    assert len(run.seconds()) == 2
    assert len(run.alone()) == meter.ALONE
    assert [kernel["calls"] for kernel in found["kernels"] if kernel["name"] == "aten::mm"] == [5], "the last step's"
    assert 0 < found["step"] <= found["seconds"]


def test_symmetric_memory_counts_that_is_freed_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter((100, 300, 0))
    monkeypatch.setattr(meter, "held", lambda: next(found, 0))
    monkeypatch.setattr(meter, "peak_gib", lambda step, symmetric=0: symmetric)
    run = Meter(Step(device="cpu", steps=1, warmup=1))
    run.start()
    for _ in range(2):
        run.tick()
    run.close()
    assert run.ranks[0][0] == 300
