"""Processes that cannot meet are told why; those that wait say for whom."""

from __future__ import annotations

import itertools
import logging
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment

from megalight.errors import ConfigurationError, LayoutError
from megalight.strategies import launchers
from tests.support.workers import free_port


def strategy(rank: int = 0, nodes: int = 1) -> Any:
    """Two processes on each machine."""
    return SimpleNamespace(
        cluster_environment=LightningEnvironment(),
        num_nodes=nodes,
        num_processes=2,
        world_size=2 * nodes,
        global_rank=rank,
        local_rank=rank % 2,
        node_rank=rank // 2,
    )


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the address of another run."""
    for name in ("MASTER_PORT", "MASTER_ADDR", "LOCAL_RANK", "NODE_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("port", "nodes", "message"),
    [
        ("abc", 1, "MASTER_PORT=abc is no port; set a number from 1 to 65535, or leave it out"),
        ("70000", 1, "MASTER_PORT=70000 is no port"),
        (None, 2, r"num_nodes=2, and MASTER_PORT is not set: .* and NODE_RANK=0 to 1 \(it is 0 here\)"),
    ],
)
def test_bad_addresses_are_refused_before_processes(
    monkeypatch: pytest.MonkeyPatch, port: str | None, nodes: int, message: str
) -> None:
    if port is not None:
        monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ConfigurationError, match=message):
        launchers.check_address(strategy(nodes=nodes))


def test_a_port_in_use_is_refused_by_whoever_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(ConfigurationError, match=f"MASTER_PORT={port} is in use on this machine"):
            launchers.check_address(strategy())
        with pytest.raises(ConfigurationError, match=f"MASTER_PORT={port} is in use on this machine"):
            launchers.meet(strategy(), "127.0.0.1", port, 60)
    launchers.check_address(strategy())


@pytest.mark.parametrize(
    ("rank", "nodes", "message"),
    [
        (0, 1, r"1 of 2 processes are here after \d+ seconds, and Trainer\(devices=2, num_nodes=1\) waits for all 2"),
        (0, 2, "Start the same command on each of the 2 machines with .* NODE_RANK=0 to 1 .it is 0 here."),
        (2, 2, r"no rank 0 answers at 127.0.0.1:\d+ after .* NODE_RANK=0 to 1 .it is 1 here."),
    ],
)
def test_who_waits_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int, nodes: int, message: str
) -> None:
    looks = itertools.count(step=10)  # ten seconds pass between two looks
    clock = SimpleNamespace(monotonic=lambda: next(looks), sleep=lambda seconds: None)
    monkeypatch.setattr(launchers, "time", clock)
    with caplog.at_level(logging.WARNING), pytest.raises(LayoutError, match=message):
        launchers.meet(strategy(rank, nodes), "127.0.0.1", free_port(), 100)
    told = [record.getMessage() for record in caplog.records]
    assert [re.search(r"after (\d+) seconds, and Trainer", text)[1] for text in told] == ["60"]  # type: ignore[index]


def test_all_go_on_when_the_last_is_here() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as ranks:
        stores = [ranks.submit(launchers.meet, strategy(rank), "127.0.0.1", port, 60) for rank in (1, 0)]
        assert all(store.result(60) is not None for store in stores)
