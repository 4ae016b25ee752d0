"""Checkpoints of a plain torch loop: all of a run in one folder, which any layout can load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megalight.checkpoint import loading, saving
from megalight.checkpoint.manifest import FULLY_RESHARDABLE
from megalight.checkpoint.run import Run
from megalight.checkpoint.scheme import SCHEMES


def save_run(run: Run, path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    """Write weights, optimizer state and random states from all ranks, and plain values along with them."""
    assert run.engine is not None
    run.engine.sync_parameters()
    common = {"values": dict(values), "optimizer": run.group_options()}
    views = SCHEMES[FULLY_RESHARDABLE](run.contents(optimizer=True))
    saving.save(path, views, common=common, rank_state=run.rank_state(), scheme=FULLY_RESHARDABLE)


def load_run(run: Run, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Go on from a folder that :func:`save_run` wrote under any layout; return the plain values.

    Raises:
        CheckpointError: missing, torn, of another model or another optimizer.
    """
    assert run.engine is not None
    run.engine.sync_parameters()
    saved = loading.open(path)
    run.model.clear_padding()
    saved.fill(run.weight_targets(), prefix=run.model.prefix)
    run.engine.refresh_masters()
    run.resume(saved)
    run.engine.recast()
    return dict(saved.common.get("values", {}))
