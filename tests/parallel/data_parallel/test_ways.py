from __future__ import annotations

from typing import Any

import pytest
import torch

from megalight.errors import ConfigurationError
from megalight.parallel.data_parallel.communication import Transport, TransportChoice
from megalight.parallel.peers import memory

CPU = torch.device("cpu")
NEAR: Any = "near"
FAR: Any = "far"


def test_auto_takes_copy_engines_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = TransportChoice("gathers", "auto")
    reason = choice.why_not(CPU)
    assert reason is not None
    assert "cpu" in reason
    assert choice.describe([reason]).startswith("by collectives")
    assert "cpu" in choice.describe([reason])
    monkeypatch.setattr(memory, "why_not", lambda device: None)
    monkeypatch.setattr(memory, "unreachable", lambda group: "needs NVLink" if group == FAR else None)
    # The order of questions does not matter.
    for _ in range(2):
        assert choice.why_not(CPU) is None
        assert choice.why_not_over(NEAR) is None
        assert choice.why_not_over(FAR) == "the other way needs NVLink"
    assert "by copy engines" in choice.describe([])


def test_what_was_named_is_refused_where_it_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"reductions='symmetric': it .*Set reductions='plain'"):
        TransportChoice("reductions", "symmetric").why_not(CPU)
    monkeypatch.setattr(memory, "unreachable", lambda group: "needs all 2 ranks on one host, and they are on 2")
    with pytest.raises(ConfigurationError, match="they are on 2"):
        TransportChoice("reductions", "symmetric").why_not_over(FAR)


@pytest.mark.parametrize(("way", "words"), [("plain", "'plain' was asked for"), ("auto", "NCCL has the buffers")])
def test_nothing_is_asked_where_something_speaks_against_it(
    way: Transport, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "why_not", lambda device: None)
    assert words in str(TransportChoice("gathers", way, "nccl_ub='local': NCCL has the buffers").why_not(CPU))
