from __future__ import annotations

from typing import Any

import pytest
import torch

from megalight.errors import ConfigurationError
from megalight.parallel.data_parallel.ways import Choice, Way
from megalight.parallel.peers import memory

CPU = torch.device("cpu")


def test_auto_takes_copy_engines_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = Choice("gathers", "auto")
    assert not choice.on(CPU)
    assert "by collectives" in choice.told()
    assert "cpu" in choice.told()
    monkeypatch.setattr(memory, "why_not", lambda device: None)
    monkeypatch.setattr(memory, "unreachable", lambda group: "needs NVLink" if group == "far" else None)
    choice = Choice("gathers", "auto")
    group: Any = "near"
    assert choice.on(CPU)
    assert choice.over(group)
    assert "by copy engines" in choice.told()
    group = "far"
    assert not choice.over(group)
    assert "needs NVLink" in choice.told()


def test_what_was_named_is_refused_where_it_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"reductions='symmetric': it .*Set reductions='plain'"):
        Choice("reductions", "symmetric").on(CPU)
    monkeypatch.setattr(memory, "unreachable", lambda group: "needs all 2 ranks on one host, and they are on 2")
    group: Any = None
    with pytest.raises(ConfigurationError, match="they are on 2"):
        Choice("reductions", "symmetric").over(group)


@pytest.mark.parametrize("way", ["plain", "auto"])
def test_nothing_is_asked_where_something_speaks_against_it(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "why_not", lambda device: None)
    assert not Choice("gathers", way, "nccl_ub='local': NCCL has the buffers").on(CPU)
