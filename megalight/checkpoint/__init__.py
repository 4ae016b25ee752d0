"""Checkpoints: sharded, atomic, checksummed folders on canonical tensor names, without pickle.

``save(path, views, common=..., rank_state=..., files=...)`` and ``open(path).fill(targets)`` work under any layout:
what one layout saved, another loads. Importing this package does not import torch; its members do, on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalight.checkpoint.async_save.saves import AsyncSaver
    from megalight.checkpoint.disk.index import TensorInfo
    from megalight.checkpoint.disk.publish import finished, is_complete, latest, remove
    from megalight.checkpoint.loading import Checkpoint, open
    from megalight.checkpoint.saving import Staged, save, stage, write
    from megalight.checkpoint.scheme import SCHEMES, Contents, Scheme, State
    from megalight.checkpoint.view import Box, View, targets_of, views_of_parameters, views_of_shards

_MEMBERS = {
    "SCHEMES": "scheme",
    "AsyncSaver": "async_save.saves",
    "Box": "view",
    "Checkpoint": "loading",
    "Contents": "scheme",
    "Scheme": "scheme",
    "State": "scheme",
    "Staged": "saving",
    "TensorInfo": "disk.index",
    "View": "view",
    "finished": "disk.publish",
    "is_complete": "disk.publish",
    "latest": "disk.publish",
    "open": "loading",
    "remove": "disk.publish",
    "save": "saving",
    "stage": "saving",
    "targets_of": "view",
    "views_of_parameters": "view",
    "views_of_shards": "view",
    "write": "saving",
}

__all__ = [
    "SCHEMES",
    "AsyncSaver",
    "Box",
    "Checkpoint",
    "Contents",
    "Scheme",
    "Staged",
    "State",
    "TensorInfo",
    "View",
    "finished",
    "is_complete",
    "latest",
    "open",
    "remove",
    "save",
    "stage",
    "targets_of",
    "views_of_parameters",
    "views_of_shards",
    "write",
]


def __getattr__(name: str) -> Any:
    if name not in _MEMBERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MEMBERS[name]}"), name)
