"""Checkpoints: sharded, atomic, checksummed folders on canonical tensor names, without pickle.

``save(path, views, common=..., rank_state=..., files=...)`` and ``open(path).fill(targets)`` work under any layout:
what one layout saved, another loads. Importing this package does not import torch; its members do, on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalight.checkpoint.async_save.saves import AsyncSaver as AsyncSaver
    from megalight.checkpoint.disk.index import TensorInfo as TensorInfo
    from megalight.checkpoint.disk.publish import finished as finished
    from megalight.checkpoint.disk.publish import is_complete as is_complete
    from megalight.checkpoint.disk.publish import latest as latest
    from megalight.checkpoint.disk.publish import remove as remove
    from megalight.checkpoint.loading import Checkpoint as Checkpoint
    from megalight.checkpoint.loading import open as open
    from megalight.checkpoint.saving import Staged as Staged
    from megalight.checkpoint.saving import save as save
    from megalight.checkpoint.saving import stage as stage
    from megalight.checkpoint.saving import write as write
    from megalight.checkpoint.scheme import SCHEMES as SCHEMES
    from megalight.checkpoint.scheme import Contents as Contents
    from megalight.checkpoint.scheme import Scheme as Scheme
    from megalight.checkpoint.scheme import State as State
    from megalight.checkpoint.view import Box as Box
    from megalight.checkpoint.view import View as View
    from megalight.checkpoint.view import targets_of as targets_of
    from megalight.checkpoint.view import views_of_parameters as views_of_parameters
    from megalight.checkpoint.view import views_of_shards as views_of_shards

_MEMBERS = {
    "AsyncSaver": "async_save.saves",
    "TensorInfo": "disk.index",
    **dict.fromkeys(("finished", "is_complete", "latest", "remove"), "disk.publish"),
    **dict.fromkeys(("Checkpoint", "open"), "loading"),
    **dict.fromkeys(("Staged", "save", "stage", "write"), "saving"),
    **dict.fromkeys(("SCHEMES", "Contents", "Scheme", "State"), "scheme"),
    **dict.fromkeys(("Box", "View", "targets_of", "views_of_parameters", "views_of_shards"), "view"),
}


def __getattr__(name: str) -> Any:
    if name not in _MEMBERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MEMBERS[name]}"), name)
