import os
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import workers
from tests.support.workers import free_port, meeting, run


def _sum_of_ranks(offset: int) -> int:
    value = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(value)
    return int(value)


def _tensor() -> torch.Tensor:
    return torch.full((3,), float(dist.get_rank()))


def _fail_on_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ZeroDivisionError("the last one")
    dist.barrier()


def _unpicklable() -> object:
    return lambda: None


def _hang_on_first() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)


def _die_on_first() -> None:
    if dist.get_rank() == 0:
        os._exit(7)


def _meet_without_first() -> int:
    """Rank 0 leaves before the others have met."""
    if dist.get_rank() == 0:
        return 0
    time.sleep(0.3)
    others = dist.new_group([1, 2], use_local_synchronization=True)
    value = torch.tensor(dist.get_rank())
    dist.all_reduce(value, group=others)
    return int(value)


def _leave_float64() -> torch.dtype:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    return before


def test_each_rank_answers_in_order() -> None:
    assert run(_sum_of_ranks, 2, 10) == [21, 21]
    assert run(_sum_of_ranks, 4, 0) == [6] * 4


def test_a_rank_may_leave_before_others_meet() -> None:
    assert run(_meet_without_first, 3) == [0, 3, 3]


def test_processes_meet_at_a_file_and_leave_none_behind() -> None:
    place = meeting()
    assert place != meeting()
    with ThreadPoolExecutor(2) as ranks:
        stores = list(ranks.map(lambda rank: next(dist.rendezvous(place, rank, 2))[0], range(2)))
    stores[0].set("word", "found")
    assert stores[1].get("word") == b"found"
    path = Path(place.removeprefix("file://"))
    assert path.exists()
    del stores
    assert not path.exists()


def test_free_ports_are_none_that_the_system_gives_to_others() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(free_port() < lowest for _ in range(20))


def test_only_tests_of_ports_ask_for_one() -> None:
    """All other processes meet at a file: another test may take a port before it is used."""
    here = Path(__file__).parents[1]
    found = {path.name for path in here.rglob("*.py") if "free_port" in path.read_text()}
    own = {"workers.py", "test_workers.py"}
    assert found == own | {"test_launch.py", "test_meeting.py", "test_resiliency.py", "test_coordinator.py"}


IMPORTED_BY = os.getpid()


def _importer() -> int:
    warnings.warn("ranks treat warnings as users' processes do", UserWarning, stacklevel=2)
    return IMPORTED_BY


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there, the server is an interpreter of its own")
def test_ranks_have_the_imports_of_the_tests() -> None:
    assert run(_importer, 2) == [os.getpid()] * 2


def test_processes_are_kept() -> None:
    first, second, third = (run(os.getpid, 2) for _ in range(3))
    # On a busy machine gloo may fail to connect ranks; they are started again then.
    assert second in (first, third)


def test_tensors_travel() -> None:
    assert [value.tolist() for value in run(_tensor, 2)] == [[0.0] * 3, [1.0] * 3]


def test_each_job_starts_from_the_default_dtype() -> None:
    assert run(_leave_float64, 1) == run(_leave_float64, 1) == [torch.float32]


def test_a_failing_rank_shows_its_own_traceback_and_the_pool_serves_on() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed in _fail_on_last(?s:.*)ZeroDivisionError: the last"):
        run(_fail_on_last, 2)
    assert run(_sum_of_ranks, 2, 0) == [1, 1]


def test_a_result_that_cannot_travel_is_told() -> None:
    with pytest.raises(AssertionError, match="pickle"):
        run(_unpicklable, 1)


def test_a_hanging_rank_times_out_and_the_pool_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    before = run(os.getpid, 2)
    now, results = 0.0, workers._pools[0].results

    class Results:
        """Once a rank has answered, the time of the other one is over."""

        def get(self, timeout: float) -> Any:
            nonlocal now
            answer = results.get(timeout=timeout)
            now += 100
            return answer

    with monkeypatch.context() as patch:
        patch.setattr(workers._pools[0], "results", Results())
        patch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: now))
        with pytest.raises(TimeoutError, match=r"ranks \[0\] of 2 did not finish _hang_on_first in 90 s"):
            run(_hang_on_first, 2, timeout=90)
    assert not set(before) & set(run(os.getpid, 2))


def test_a_dead_rank_is_told_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError, match="rank 0 of 2 failed in _die_on_first:\nthe process died with exit code 7"):
        run(_die_on_first, 2)
    assert time.monotonic() - started < 150  # less than the timeout of a job: the parent saw the death itself
    assert run(_sum_of_ranks, 2, 0) == [1, 1]


def test_ranks_that_did_not_meet_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    collect, calls = workers._collect, []

    def once(*arguments: Any) -> tuple[dict[int, Any], dict[int, str]]:
        calls.append(collect(*arguments))
        return ({}, {0: "tests.support.workers.NotMet"}) if len(calls) == 1 else calls[-1]

    monkeypatch.setattr(workers, "_collect", once)
    assert workers.run(os.getpid, 2) == [calls[-1][0][0], calls[-1][0][1]] != [calls[0][0][0], calls[0][0][1]]
