"""Megalight: write the model for one device, declare how its tensors split, train it under Lightning on any layout."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalight.parallel.layout import Layout as Layout
    from megalight.sharding import fully_shard as fully_shard
    from megalight.training import Training as Training
    from megalight.training import parallelize as parallelize

__version__ = "0.1.0"

_MEMBERS = {
    "Layout": "megalight.parallel.layout",
    "Training": "megalight.training",
    "fully_shard": "megalight.sharding",
    "parallelize": "megalight.training",
}


def __getattr__(name: str) -> Any:
    if name not in _MEMBERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MEMBERS[name]), name)
