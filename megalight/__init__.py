"""Megalight: write the model for one device, declare how its tensors split, train it under Lightning on any layout."""

from typing import TYPE_CHECKING

from megalight.imports import lazy_members

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

__getattr__ = lazy_members(__name__, _MEMBERS)
