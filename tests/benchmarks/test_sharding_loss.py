"""The script that holds losses of all ways to shard side by side, small."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks import sharding_loss
from tests.support.workers import run


def _losses(path: str) -> int:
    return sharding_loss.main([path, "--size=small", "--steps", "3"])


def test_all_ways_begin_alike(tmp_path: Path) -> None:
    path = tmp_path / "loss.json"
    assert run(_losses, 2, str(path)) == [0, 0]
    ways = json.loads(path.read_text())["ways"]
    assert list(ways) == list(sharding_loss.WAYS)
    expected = ways["optim"]
    for found in ways.values():
        np.testing.assert_allclose(found["losses"], expected["losses"], rtol=2e-3)
        np.testing.assert_allclose(found["norms"], expected["norms"], rtol=2e-2)
