import os

import pytest

from megalight.cli import report
from megalight.cli.report import launch_rank, reported, tell
from megalight.errors import DataError, LayoutError


@pytest.mark.parametrize(
    ("variables", "rank"),
    [({}, 0), ({"RANK": "3", "LOCAL_RANK": "0"}, 3), ({"LOCAL_RANK": "2"}, 2), ({"NODE_RANK": "1"}, 1)],
)
def test_ranks_as_launchers_announce_them(variables, rank, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch_rank() == rank


def test_long_messages_are_cut_to_a_screen(capsys):
    tell("megalight x", "\n".join(f"line {i} " + "word " * 60 for i in range(40)))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) < 140
    assert "--debug" in lines[-1]


def test_errors_that_all_ranks_share_are_told_by_rank_zero(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit, match="2"), reported("megalight fit"):
        raise LayoutError("tp is 3")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("orphaned", "told"), [(False, True), (True, False)])
def test_one_ranks_own_error_is_told_unless_rank_zero_fails_too(orphaned, told, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(report, "PATIENCE_SECONDS", 0.2)
    if orphaned:  # the process that launched this one, rank 0, has gone
        monkeypatch.setattr(os, "getppid", lambda: report._PARENT + 1)
    with pytest.raises(SystemExit, match="2"), reported("megalight fit"):
        raise DataError("torn file on this node")
    assert ("megalight fit [rank 1]: error: torn file on this node" in capsys.readouterr().err) == told


def test_errors_that_are_not_the_users_come_with_their_traceback():
    with pytest.raises(ZeroDivisionError), reported("megalight fit", OSError):
        _ = 1 / 0
