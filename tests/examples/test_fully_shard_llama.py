"""The example of full sharding in a plain loop: it learns, and the same on two ranks as on one."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.support.source import ROOT
from tests.support.workers import run

pytest.importorskip("transformers")


def _losses() -> list[float]:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        found: list[float] = importlib.import_module("fully_shard_llama").train(12)
    finally:
        sys.path.pop(0)
    return found


def test_two_ranks_learn_as_one() -> None:
    (one,) = run(_losses, 1)
    assert one[-1] < 0.8 * one[0]
    for losses in run(_losses, 2):
        assert losses == pytest.approx(one, rel=1e-4)  # all ranks read the same batch
