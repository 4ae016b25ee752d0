"""A run whose checkpoints are in a store of objects: saved by all ranks, resumed from, removed by rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch.distributed as dist

from megalight import checkpoint
from megalight.callbacks import Retention
from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.errors import CheckpointError, StorageError
from megalight.strategies.checkpoints import hooks
from tests.strategies.test_async_saves import fit
from tests.support.objects import BUCKET, server, use  # noqa: F401 (a fixture)
from tests.support.workers import run


def _runs(folder: str, url: str, address: str, kind: str | None) -> list[list[float]]:
    with pytest.MonkeyPatch.context() as patch:
        use(address, patch)
        keep = {"kind": kind, "save_last": False}
        whole = fit(f"{folder}/whole", steps=2, save_last=False, kind=None)
        first = fit(f"{url}/run", steps=1, **keep)
        dist.barrier()
        rest = fit(f"{url}/run", Retention(last=1), steps=2, resume=str(latest_checkpoint(f"{url}/run")), **keep)
        dist.barrier()
        names = [path.name for path in checkpoint.finished(f"{url}/run")]
        assert names == ["step=2.ckpt"]
        return [whole, first + rest]


@pytest.mark.full  # that saves go to a store and come back is in tests/checkpoint/disk/test_remote.py
@pytest.mark.parametrize("kind", [None, "persistent"])
def test_a_run_resumes_from_a_store(tmp_path: Path, server: str, kind: str | None) -> None:  # noqa: F811
    for whole, resumed in run(_runs, 2, str(tmp_path), f"s3://{BUCKET}/{uuid4().hex}", server, kind):
        assert whole == resumed


def _refuse(*_: Any) -> None:
    raise StorageError("no route to host")


def _fails_on_one_rank(folder: str) -> list[str]:
    """Storage fails rank 0 when it removes a checkpoint, and rank 1 when the run resumes."""
    told: list[str] = []
    keep: Any = {"steps": 2, "kind": None, "save_last": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks.folders, "remove", _refuse, raising=False)
        fit(folder, save_top_k=1, **keep)
        if dist.get_rank() == 1:
            patch.setattr(hooks, "open_saved", _refuse)
        try:
            fit(folder, resume=f"{folder}/step=1.ckpt", **keep)
        except CheckpointError as error:
            told.append(str(error))
    return told


def test_storage_that_fails_one_rank_stops_all_or_none(tmp_path: Path) -> None:
    for (message,) in run(_fails_on_one_rank, 2, str(tmp_path)):
        assert message == f"opening {tmp_path}/step=1.ckpt failed on rank 1: no route to host"
    assert {path.name for path in checkpoint.finished(tmp_path)} == {"step=1.ckpt", "step=2.ckpt"}
