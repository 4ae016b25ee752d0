"""Rank 0 says what all ranks have alike."""

import logging

import pytest

import megalight.data.module
from megalight.first_rank import is_first, launch_rank
from tests.support.workers import run


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
    assert is_first() == (rank == 0)


def _said():
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    log = logging.getLogger(megalight.data.module.__name__)
    log.addHandler(handler)
    try:
        log.warning("the test split holds no documents")
    finally:
        log.removeHandler(handler)
    return heard


def test_what_all_ranks_have_alike_is_said_once():
    assert run(_said, 2) == [["the test split holds no documents"], []]
