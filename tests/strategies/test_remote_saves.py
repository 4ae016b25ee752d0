"""A run whose checkpoints are in a store of objects: saved by all ranks, resumed from, removed by rules."""

from __future__ import annotations

from uuid import uuid4

import pytest
import torch.distributed as dist

from megalight import checkpoint
from megalight.callbacks import Retention
from megalight.cli.newest import newest_in
from tests.objects import BUCKET, server, use  # noqa: F401 (a fixture)
from tests.strategies.test_async_saves import fit
from tests.workers import run


def _runs(url: str, address: str, kind: str | None) -> list[list[float]]:
    with pytest.MonkeyPatch.context() as patch:
        use(address, patch)
        keep = {"kind": kind, "save_last": False}
        whole = fit(f"{url}/whole", **keep)
        first = fit(f"{url}/run", steps=2, **keep)
        dist.barrier()
        rest = fit(f"{url}/run", Retention(last=2), resume=str(newest_in(f"{url}/run")), **keep)
        dist.barrier()
        names = [path.name for path in checkpoint.finished(f"{url}/run")]
        assert names == ["step=3.ckpt", "step=4.ckpt"]
        return [whole, first + rest]


@pytest.mark.parametrize("kind", [None, pytest.param("persistent", marks=pytest.mark.full)])
def test_a_run_resumes_from_a_store(server: str, kind: str | None) -> None:  # noqa: F811
    for whole, resumed in run(_runs, 2, f"s3://{BUCKET}/{uuid4().hex}", server, kind):
        assert whole == resumed
