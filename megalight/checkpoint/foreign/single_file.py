"""Single-file checkpoints, which Lightning's own strategies write: opened without running code from the file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalight.checkpoint.disk.files import CODES
from megalight.checkpoint.disk.index import TensorInfo
from megalight.checkpoint.foreign.pickles import check_archive, check_is_archive
from megalight.checkpoint.inspection import CheckpointReport
from megalight.errors import CheckpointError

WEIGHTS = "state_dict"
"""Lightning's entry for the weights."""


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return Lightning's entries in a single-file checkpoint, with its tensors mapped from the file.

    Raises:
        CheckpointError: the file is not a checkpoint of Lightning, or holds more than tensors and plain values.
    """
    check_is_archive(path)
    try:
        check_archive(path)
        # Mapped: tensors that nobody looks at are not read. Plain values only, as a pickle may run code.
        entries = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch, zipfile and the unpickler each raise their own kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} cannot be read as a single-file checkpoint: {reason}") from error
    if not isinstance(entries, dict) or not isinstance(entries.get(WEIGHTS), Mapping):
        raise CheckpointError(f"{path} is not a checkpoint of Lightning: it has no {WEIGHTS!r}.")
    return entries


def describe(path: str | os.PathLike[str], *, norms: bool = False) -> CheckpointReport:
    """Report what the file holds, like :func:`megalight.checkpoint.inspection.describe`.

    Raises:
        CheckpointError: see :func:`read`.
    """
    path = Path(path)
    entries = read(path)
    tensors: dict[str, Tensor] = {name: value for name, value in entries[WEIGHTS].items() if isinstance(value, Tensor)}
    names = {name: str(value.dtype).removeprefix("torch.") for name, value in tensors.items()}
    # Other dtypes have no size in our terms, so they are left out of the report.
    known = {name for name, dtype in names.items() if dtype in CODES}
    versions = {"lightning": str(entries.get("pytorch-lightning_version", "of unknown version"))}
    status = path.stat()
    return CheckpointReport(
        path=path,
        tensors={name: TensorInfo(name, tuple(tensors[name].shape), names[name], ()) for name in sorted(known)},
        # In float64: squares of large values overflow.
        norms={name: float(tensors[name].double().norm()) for name in known} if norms else {},
        files={path.name: status.st_size},
        progress={key: entries[key] for key in ("epoch", "global_step") if key in entries},
        saved_at=status.st_mtime,
        world_size=1,
        versions=versions,
        scheme="one file",
        layout="",
    )
